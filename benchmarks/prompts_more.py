"""What prompts.py measures besides the time to the first token."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import random
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

import psutil
from stream_modes import CPU, NO_COPIES, SHARED, STREAMED

VOCABULARY = 32768
TOGETHER, APART = "together", "apart"


def models() -> list[Any]:
    """The hybrid models of this process: none with SGLang, and without kt-moe."""
    report = sys.modules.get("kt_kernel.serving.report")
    return [] if report is None else list(report._models)


def counters() -> dict[str, int]:
    total: dict[str, int] = {}
    for model in models():
        for name, value in model.stats().items():
            total[name] = total.get(name, 0) + value
    return total


_seen: list[weakref.ref[Any]] = []


def newest() -> Any:
    """The model that is served now; earlier ones may not be freed yet."""
    known = [seen() for seen in _seen]
    _seen.extend(weakref.ref(model) for model in models() if model not in known)
    return _seen[-1]()


def rates_of_model() -> dict[str, Any]:
    """`rates_of` the model that is served now."""
    return rates_of(newest().layers)


def rates_of(layers: list[Any]) -> dict[str, Any]:
    """What was measured at the start, and the size of the experts. Empty if nothing is streamed.
    layers: those of a model with experts on this process's CPU."""
    layer = layers[0]
    if layer._streaming is None:
        return {}
    rates, packed = layer._streaming._model.rates, layer._streaming._packed
    cold = layer.placement.num_cold
    return {
        **dataclasses.asdict(rates),
        "threshold": layer._streaming._model.threshold,
        "expert_bytes": packed.expert_bytes,
        "cold": cold,
        "pays_from": rates.pays_from(
            cold, layer.wrapper.num_experts_per_tok * cold / layer.num_experts
        ),
        "bus_seconds": rates.expert_on_bus * cold * len(layers),
    }


def profile(bench: Any, tokens: int) -> dict[str, list[list[Any]]]:
    """The GPU's kernels in a prompt, by mode: [name, calls, milliseconds], the longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    found = {}
    for mode in (STREAMED, NO_COPIES):
        bench.set(mode)
        bench.seconds(tokens)
        with record(activities=[ProfilerActivity.CUDA]) as made:
            bench.seconds(tokens)
        rows = sorted(made.key_averages(), key=lambda row: -row.self_device_time_total)[:25]
        found[mode] = [[r.key[:100], r.count, r.self_device_time_total / 1e3] for r in rows]
    return found


def beside(
    bench: Any, engine: Any, side: Any, streams: int = 4, prompts: int = 6
) -> dict[str, Any]:
    """Seconds between the tokens of requests that decode while long prompts come. side: the module
    of the engine."""
    found: dict[str, Any] = {}
    for mode in (CPU, SHARED):
        bench.set(mode)
        gaps = sorted(side.pauses(bench, engine, streams, prompts))
        found[mode] = {
            "tokens": len(gaps),
            "prompts": prompts,
            "p50": gaps[len(gaps) // 2],
            "p99": gaps[int(len(gaps) * 0.99)],
            "max": gaps[-1],
        }
    return found


def _memory() -> dict[str, int]:
    """Of this process and its children; what is in use on the first device, and torch's part of
    this process."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    found = {
        "resident": 0,
        "files": 0,
        "threads": 0,
        "device_used": total - free,
        "torch_allocated": torch.cuda.memory_allocated(),
    }
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        found["resident"] += process.memory_info().rss
        found["files"] += process.num_fds()
        found["threads"] += process.num_threads()
    return found


def many(bench: Any, count: int, tokens: int) -> dict[str, Any]:
    """Memory before and after long prompts of different lengths, of which some are warm-up."""
    bench.set(SHARED)
    for i in range(30):
        bench.seconds(tokens - 7 * (i % 10))
    before, begin = _memory(), time.monotonic()
    for i in range(count):
        bench.seconds(tokens - 7 * (i % 10))
    return {
        "prompts": count,
        "tokens": tokens,
        "seconds": time.monotonic() - begin,
        "before": before,
        "after": _memory(),
    }


def cancelled(bench: Any, engine: Any, side: Any, count: int = 20) -> dict[str, Any]:
    """Prompts that are cancelled early, beside a request that goes on: its tokens must be those
    that it gets alone."""
    bench.set(SHARED)
    prompt = bench.prompt(600)
    alone, before = side.beside_cancelled(bench, engine, prompt, 0), _memory()
    found = side.beside_cancelled(bench, engine, prompt, count)
    same = next(
        (i for i, (a, b) in enumerate(zip(alone, found, strict=True)) if a != b), len(alone)
    )
    return {
        "cancelled": count,
        "tokens": len(found),
        "same_tokens": same,
        "before": before,
        "after": _memory(),
    }


def more(bench: Any, engine: Any, args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """What else was asked for, by name."""
    side = importlib.import_module(f"prompts_{args.engine}")
    if args.host:
        bench.set(STREAMED)
        yield "host", side.host_profile(bench, args.host)
    if args.profile:
        yield "profile", profile(bench, args.profile)
    if args.beside:
        yield "beside", beside(bench, engine, side)
    if args.cancelled:
        yield "cancelled", cancelled(bench, engine, side)
    if args.many:
        yield "many", many(bench, args.many, args.many_tokens)


def logprobs(name: str, bench: Any, engine: Any, modes: list[str]) -> dict[str, list[float]]:
    """Log-probabilities of the tokens of two fixed prompts, by mode; in mode `APART`, the prompts
    are not computed together."""
    choose = random.Random(5)
    given = [[choose.randrange(2, VOCABULARY) for _ in range(1500)] for _ in range(2)]
    ask = _sglang_logprobs if name == "sglang" else _vllm_logprobs
    found = {}
    for mode in modes:
        bench.set(mode)
        batches = [[prompt] for prompt in given] if mode == APART else [given]
        found[mode] = [value for batch in batches for value in ask(engine, batch)]
    return found


def _sglang_logprobs(engine: Any, given: list[list[int]]) -> list[float]:
    answers = engine.generate(
        input_ids=given,
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
    )
    rows = [answer["meta_info"]["input_token_logprobs"] for answer in answers]
    return [value for row in rows for value, *_ in row[1:]]


def _vllm_logprobs(engine: Any, given: list[list[int]]) -> list[float]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, prompt_logprobs=0
    )
    for number, prompt in enumerate(given):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    rows: dict[str, list[float]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                tokens, shown = output.prompt_token_ids, output.prompt_logprobs
                rows[output.request_id] = [
                    at[token].logprob for token, at in zip(tokens[1:], shown[1:], strict=True)
                ]
    return [value for _, row in sorted(rows.items()) for value in row]


def distances(found: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Mean distance of log-probabilities by configuration and mode, from the stock engine's first
    answer, or without a stock engine from those of the CPU alone. That of the stock engine itself
    is between its two ways to compute the prompts."""
    shown = {}
    for name, modes in found.items():
        base = found["stock"][TOGETHER] if "stock" in found else modes.get(CPU, [])
        for mode, values in modes.items():
            if base and values is not base:
                shown[f"{name}: {mode}"] = distance(base, values)
    return shown


def distance(base: list[float], values: list[float]) -> float:
    """Their mean distance."""
    return sum(abs(a - b) for a, b in zip(base, values, strict=True)) / len(base)
