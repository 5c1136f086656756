"""What `kt tune` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..runtime.text import shown_size
from ..tuning.arguments import not_predicted
from ..tuning.choice import Candidate
from ..tuning.run import Check, Result

_AGAIN = "Times may be wrong: end what else uses the CPUs, and run kt tune again."
_NEAR = 0.15  # of a prediction's error, above which the check says so


def describe(result: Result, checked: Check | None) -> dict[str, Any]:
    """What was assumed, predicted and checked, as JSON."""
    one = result.chosen
    return {
        "options": result.options,
        "command": result.server.shown(),
        "why": _why(result),
        "not_predicted": _not_predicted(result),
        "assumed": asdict(result.wishes),
        "predicted": {
            "decode_tokens_s": dict(one.decode),
            "first_token_seconds": dict(one.prefill),
            "seconds": one.seconds,
        },
        "checked": None if checked is None else asdict(checked),
        "disturbed": disturbed(result, checked),
    }


def disturbed(result: Result, checked: Check | None) -> dict[str, str]:
    """What was measured while something else used the CPUs, and what did."""
    if checked is None or checked.disturbed is None:
        return result.disturbed
    return result.disturbed | {"the check": checked.disturbed}


def describe_all(result: Result, checked: Check | None) -> dict[str, Any]:
    """The same, and everything that was measured and compared."""
    return describe(result, checked) | {
        "engine": asdict(result.model.engine),
        "device_rates": asdict(result.model.device),
        "cpu_rates": [asdict(cpu) for cpu in result.cpus],
        "candidates": [
            {
                "method": one.cpu.method,
                "threads": one.cpu.threads,
                "num_gpu_experts": one.hot.count,
                "deferred": one.deferred,
                "streaming_from": one.streaming,
                "decode_tokens_s": dict(one.decode),
                "first_token_seconds": dict(one.prefill),
                "seconds": one.seconds,
                "gpu_bytes": one.hot.gpu_bytes,
                "cpu_bytes": one.cpu_bytes,
                "not_chosen_because": one.allowed,
            }
            for one in result.candidates
        ],
    }


def text(result: Result) -> str:
    """What was predicted, and the recommended command."""
    lines = [
        "",
        "| method | threads | hot experts | deferred | decode, 1 | 4 | 16 | prompt of 2,048 "
        "| 8,192 | GPU | CPU |",
        "|" + " --- |" * 11,
    ]
    lines += [_row(one, one is result.chosen) for one in _shown(result)]
    lines += [
        "",
        "Predicted: decode in tokens/s of all streams, prompts in seconds to the first token, "
        "memory of the hot and the cold experts.",
    ]
    if result.room is not None:
        lines.append(f"Memory: {result.room.shown(result.streaming_takes)}.")
    if not result.model.engine.measured:
        lines.append(
            f"The times of {result.model.engine.engine} itself are those of another machine."
        )
    if left_out := _not_predicted(result):
        lines.append(f"Not in the predictions: {'; '.join(left_out)}.")
    lines += ["", f"Recommended: {_why(result)}", "", f"  {result.server.shown()}"]
    return "\n".join(lines)


def text_checked(result: Result, checked: Check | None) -> str:
    """What the check found, and whether something disturbed it or what was measured before."""
    lines = [] if checked is None else ["", _checked(result, checked)]
    doubts = [f"{doubt} of {what}" for what, doubt in disturbed(result, checked).items()]
    if doubts:
        lines += ["", f"Disturbed: {'; '.join(doubts)}. {_AGAIN}"]
    return "\n".join(lines)


def _not_predicted(result: Result) -> list[str]:
    return not_predicted(result.server.engine, result.wishes.engine_arguments)


def _shown(result: Result) -> list[Candidate]:
    """The chosen candidate, and those that differ from it in one choice."""
    best = result.chosen

    def differs(one: Candidate) -> int:
        return (
            ((one.cpu.method, one.cpu.threads) != (best.cpu.method, best.cpu.threads))
            + (one.hot.count != best.hot.count)
            + (one.deferred != best.deferred)
        )

    return [one for one in result.candidates if differs(one) <= 1]


def _row(one: Candidate, chosen: bool) -> str:
    cells = [
        one.cpu.method,
        "default" if one.cpu.threads is None else str(one.cpu.threads),
        str(one.hot.count),
        str(one.deferred),
        *(f"{rate:.1f}" for rate in one.decode.values()),
        *(f"{seconds:.2f}" for seconds in one.prefill.values()),
        shown_size(one.hot.gpu_bytes),
        shown_size(one.cpu_bytes),
    ]
    note = " ← recommended" if chosen else f" ({one.allowed})" if one.allowed else ""
    return "| " + " | ".join(cells) + " |" + note


def _why(result: Result) -> str:
    """Why the recommended candidate was chosen, in words."""
    one, goal = result.chosen, result.wishes.goal
    parts = []
    if result.room is None:
        parts.append("there is no GPU, so all experts are cold")
    elif one.hot.count == 0:
        parts.append("no hot expert fits on the GPU")
    elif result.several:
        parts.append("as many hot experts as fit into what one GPU has left for them")
    elif one.hot.count == result.tuned.shape.experts:
        parts.append("all experts fit on the GPU")
    else:
        parts.append(f"{one.hot.count} hot experts per layer fit on the GPU")
    threads = one.cpu.threads
    if threads is None:
        parts.append("kt-moe's own number of threads")
    else:
        parts.append(f"{threads} thread{'s' * (threads > 1)}")
    if one.deferred:
        parts.append(f"{one.deferred} deferred experts hide the CPU's time")
    requests = "A request" if goal.streams == 1 else f"{goal.streams} requests"
    return (
        f"{'; '.join(parts)}. {requests} of {goal.prompt} tokens and an answer of {goal.answer} "
        f"take{'s' * (goal.streams == 1)} {one.seconds:.2f} s, the least of what is compared"
    )


def _checked(result: Result, checked: Check) -> str:
    goal = result.wishes.goal
    step, first = checked.errors
    line = (
        f"Checked: {goal.streams / checked.decode:.1f} tokens/s with {goal.streams} "
        f"stream{'s' * (goal.streams > 1)} ({goal.streams / checked.decode_predicted:.1f} "
        f"predicted), {checked.prefill:.3f} s to the first token ({checked.prefill_predicted:.3f} "
        "predicted)"
    )
    if max(abs(step), abs(first)) > _NEAR:
        line += (
            f". A prediction is more than {_NEAR:.0%} off, so the table is only a rough guide here"
        )
    return line
