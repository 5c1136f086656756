"""What prompts.py measures in vLLM beside running requests, and on the host."""

from __future__ import annotations

import cProfile
import pstats
import time
from typing import Any

from vllm import SamplingParams


def _sampling(steps: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=steps, min_tokens=steps, ignore_eos=True, detokenize=False
    )


def pauses(bench: Any, engine: Any, streams: int, prompts: int) -> list[float]:
    """Seconds between the tokens of requests that decode while long prompts come."""
    _round[0] += 1

    def ask(name: str, tokens: int, steps: int) -> None:
        prompt = {"prompt_token_ids": bench.prompt(tokens)}
        engine.add_request(f"{name} of round {_round[0]}", prompt, _sampling(steps))

    for i in range(streams):
        ask(f"stream {i}", 32, 60 * (prompts + 1))
    gaps: list[float] = []
    last, count, sent = None, 0, 0
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.monotonic()
        if any("stream" in output.request_id for output in outputs):
            count += 1
            if last is not None and count > 20:
                gaps.append(now - last)
            last = now
        if count >= 60 * (sent + 1) and sent < prompts:
            ask(f"prompt {sent}", 8192, 1)
            sent += 1
    assert sent == prompts
    return gaps


_round = [0]  # names of requests must differ


def beside_cancelled(bench: Any, engine: Any, prompt: list[int], count: int) -> list[int]:
    """The 64 tokens of a request, beside which some prompts of 20,000 tokens are cancelled after
    one of their chunks."""
    engine.add_request("kept", {"prompt_token_ids": prompt}, _sampling(64))
    tokens: list[int] = []
    sent = 0
    while engine.has_unfinished_requests():
        if tokens and sent < count:
            long = {"prompt_token_ids": bench.prompt(20000)}
            engine.add_request(f"cancelled {sent}", long, _sampling(1))
        for output in engine.step():
            if output.request_id.startswith("kept"):
                tokens = list(output.outputs[0].token_ids)
        if tokens and sent < count:
            engine.abort_request([f"cancelled {sent}"])
            sent += 1
    return tokens


def host_profile(bench: Any, tokens: int, prompts: int = 5) -> list[list[Any]]:
    """Where the host's time goes in some prompts: [function, calls, seconds in it alone, seconds
    with what it calls], the longest first. Python is slower while it is measured."""
    bench.seconds(tokens)
    with cProfile.Profile() as made:
        for _ in range(prompts):
            bench.seconds(tokens)
    rows = []
    for (file, line, name), (_, calls, own, total, _) in pstats.Stats(made).stats.items():
        where = "/".join(file.split("/")[-2:])
        rows.append([f"{where}:{line} {name}"[:100], calls, round(own, 5), round(total, 5)])
    return sorted(rows, key=lambda row: -row[3])[:120]
