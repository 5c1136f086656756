"""What prompts.py measures in SGLang beside running requests: pauses, and cancelled prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

_CANCELLED_AFTER = 0.01  # seconds; a prompt of 20,000 tokens takes longer


async def decode(
    engine: Any, prompt: list[int], steps: int, each: Callable[[int], None]
) -> list[int]:
    """Decodes a number of tokens. each: called with the number of tokens whenever some arrive."""
    sampling = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
    tokens: list[int] = []
    async for answer in await engine.async_generate(
        input_ids=prompt, sampling_params=sampling, stream=True
    ):
        tokens = list(answer["output_ids"])
        each(len(tokens))
    assert len(tokens) == steps, len(tokens)
    return tokens


def pauses(bench: Any, engine: Any, streams: int, prompts: int) -> list[float]:
    """Seconds between the tokens of the first of some requests that decode, while long prompts
    come."""
    gaps: list[float] = []
    sent: list[asyncio.Task[Any]] = []
    last: list[float] = []

    def seen(count: int) -> None:
        now = time.monotonic()
        if last and count > 20:
            gaps.append(now - last[0])
        last[:] = [now]
        if count >= 60 * (len(sent) + 1) and len(sent) < prompts:
            prompt = bench.prompt(8192)
            sent.append(asyncio.ensure_future(decode(engine, prompt, 1, lambda _: None)))

    async def work() -> None:
        steps = 60 * (prompts + 1)
        watched = decode(engine, bench.prompt(32), steps, seen)
        others = [
            decode(engine, bench.prompt(32), steps, lambda _: None) for _ in range(1, streams)
        ]
        await asyncio.gather(watched, *others)
        await asyncio.gather(*sent)

    engine.loop.run_until_complete(work())
    assert len(sent) == prompts
    return gaps


def beside_cancelled(bench: Any, engine: Any, prompt: list[int], count: int) -> list[int]:
    """The 64 tokens of a request, beside which some prompts of 20,000 tokens are cancelled."""
    sent: list[asyncio.Task[Any]] = []

    async def cancelled(name: str) -> None:
        sampling = {"temperature": 0, "max_new_tokens": 1}
        answers = await engine.async_generate(
            input_ids=bench.prompt(20000), sampling_params=sampling, stream=True, rid=name
        )
        answer = asyncio.ensure_future(anext(answers))
        await asyncio.sleep(_CANCELLED_AFTER)
        engine.tokenizer_manager.abort_request(name)
        reason = (await answer)["meta_info"]["finish_reason"]
        assert reason["type"] == "abort", reason

    def seen(tokens: int) -> None:
        if len(sent) < min(count, tokens):
            sent.append(asyncio.ensure_future(cancelled(f"cancelled {len(sent)}")))

    async def work() -> list[int]:
        tokens = await decode(engine, prompt, 64, seen)
        await asyncio.gather(*sent)
        return tokens

    tokens = engine.loop.run_until_complete(work())
    assert len(sent) == count
    return tokens
