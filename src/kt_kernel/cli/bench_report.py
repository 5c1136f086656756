"""The output of ``kt bench trace``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict

from ..trace.streamed import StreamedModel
from ..trace.summary import LayerTimes, ModelTimes, Summary


def text(summary: Summary) -> str:
    """A Markdown table of the layers of each model, and its totals."""
    parts = [
        [_title(model), "", *_table(model.layers), "", *_totals(model)] for model in summary.models
    ]
    parts += [_streamed(model) for model in summary.streamed]
    return "\n\n".join("\n".join(part) for part in parts)


def to_json(summary: Summary) -> str:
    """The same as a JSON object with the lists "models" and "streamed"."""
    return json.dumps(asdict(summary), indent=1)


def _title(model: ModelTimes) -> str:
    return (
        f"{model.device}, model {model.chain}: microseconds per pass, mean of "
        f"{_count(model.passes, 'pass', 'es')} of {_count(model.tokens, 'token')}"
        + _others(model.counts, model.tokens)
    )


def _others(counts: dict[int, int], shown: int) -> str:
    others = ", ".join(
        f"{passes} of {_count(tokens, 'token')}"
        for tokens, passes in counts.items()
        if tokens != shown
    )
    return f" (also in this trace: {others})" if others else ""


def _table(rows: Iterable[LayerTimes]) -> list[str]:
    lines = ["| layer | passes | CPU | GPU | transfers | exposed |", "|---|---|---|---|---|---|"]
    for row in rows:
        times = " | ".join(f"{t:.1f}" for t in (row.cpu, row.gpu, row.transfers, row.exposed))
        lines.append(f"| {row.layer} | {row.passes} | {times} |")
    return lines


def _totals(model: ModelTimes) -> list[str]:
    """The totals, with the names and formulas of `ModelTimes`."""
    lines = [
        f"t_cpu {model.t_cpu:.1f}, t_gpu (with transfers) {model.t_gpu:.1f}, exposed "
        f"{model.exposed:.1f}, elapsed {model.elapsed:.1f}"
    ]
    if model.bound is not None and model.reached is not None and model.share is not None:
        lines.append(
            f"speedup over no overlap: at most {model.bound:.2f}, reached {model.reached:.2f} "
            f"({model.share:.0%})"
        )
    return lines


def _streamed(model: StreamedModel) -> list[str]:
    """The streamed batches of a model, with the names of `StreamedTimes` and `StreamedModel`."""
    lines = [
        f"{model.device}, model {model.chain}, streamed: microseconds per batch, mean of "
        f"{_count(model.batches, 'batch', 'es')} of {_count(model.tokens, 'token')}"
        + _others(model.counts, model.tokens),
        "",
        "| layer | batches | streamed | on the CPU | MB | bus | GPU | CPU | waits for the bus"
        " | waits for the CPU | elapsed |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in model.layers:
        times = row.bus, row.gpu, row.cpu, row.bus_wait, row.cpu_wait, row.elapsed
        cells = [f"{row.streamed:.1f}", f"{row.on_cpu:.1f}", f"{row.megabytes:.1f}"]
        cells += [f"{time:.1f}" for time in times]
        lines.append(f"| {row.layer} | {row.batches} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"of the elapsed time, the bus was busy {model.bus_share:.0%}, the GPU "
        f"{model.gpu_share:.0%}, the CPU {model.cpu_share:.0%}; {model.gigabytes_s:.1f} GB/s on "
        "the bus",
    ]
    return lines


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"
