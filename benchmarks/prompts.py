"""Times prompts in a stock engine: cold experts on the CPU, streamed to the GPU, or shared.

    ENV/bin/python benchmarks/prompts.py --engine vllm --json FILE \\
        --configurations INT4_G32:0:512,8192 BF16:0.25:8192

Run it in the engine's environment. METHOD:HOT:TOKENS,... is a method, the part of the experts that
is hot, and the lengths of prompts. Each configuration is served with the modes of stream_modes.py
in turn, prompt after prompt. The bound is the larger of the copies alone, at the speed measured at
the start, and of the GPU alone (mode "no copies"). With vLLM, also:

- pauses between the tokens of requests that decode beside long prompts (--beside)
- memory before and after many long prompts (--many)
- requests that are cancelled during their prompt (--cancelled)
- the CPU's time per expert by its tokens (--rates)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import resource
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import stream_modes
from stream_modes import CPU, MODES, NO_COPIES, SHARED

if stream_modes.VARIABLE in os.environ:  # also in the processes that an engine spawns
    stream_modes.install(Path(os.environ[stream_modes.VARIABLE]))

VOCABULARY = 32768
THRESHOLD = 256
ENGINES = {
    "vllm": {
        "attention_backend": "TRITON_ATTN",
        "moe_backend": "triton",
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.4,
        "enable_prefix_caching": False,
        # Nothing is compiled, so that engines start sooner.
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8],
        },
    },
    "sglang": {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "moe_runner_backend": "triton",
        "disable_radix_cache": True,
        "disable_prefill_cuda_graph": True,
        "cuda_graph_max_bs_decode": 4,
        "chunked_prefill_size": 8192,
        "mem_fraction_static": 0.4,
    },
}


class Bench:
    """An engine that serves one configuration."""

    def __init__(self, generate: Callable[..., None], mode: Path, args: argparse.Namespace) -> None:
        self._generate, self._mode, self._args = generate, mode, args
        self._choose = random.Random(0)

    def set(self, mode: str) -> None:
        self._mode.write_text(mode)

    def prompt(self, tokens: int) -> list[int]:
        """A new one each time, so that no prefix is cached."""
        return [self._choose.randrange(2, VOCABULARY) for _ in range(tokens)]

    def seconds(self, tokens: int) -> float:
        prompt = self.prompt(tokens)
        begin = time.monotonic()
        self._generate([prompt], 1)
        return time.monotonic() - begin

    def first_token(self, lengths: list[int]) -> dict[str, dict[str, Any]]:
        """Seconds to the first token, by length and mode, and what was streamed in vLLM."""
        found: dict[str, dict[str, Any]] = {}
        for tokens in lengths:
            for mode in self._args.modes:  # compile what the first use of a size compiles
                self.set(mode)
                if mode != CPU or tokens <= 2048:
                    self.seconds(tokens)
        for _ in range(self._args.rounds):
            for tokens in lengths:
                for mode in self._args.modes:
                    self.set(mode)
                    before, taken = counters(), self.seconds(tokens)
                    row = found.setdefault(str(tokens), {}).setdefault(mode, {"seconds": []})
                    row["seconds"].append(taken)
                    row["counted"] = {k: v - before.get(k, 0) for k, v in counters().items()}
        return found


def models() -> list[Any]:
    """The hybrid models of this process: none with SGLang."""
    from kt_kernel.serving import report

    return list(report._models)


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
    """What was measured at the start, and the size of the experts."""
    model = newest()
    layer = model.layers[0]
    rates, packed = layer._streaming._model.rates, layer._streaming._packed
    cold = layer.placement.num_cold
    return {
        **vars(rates),
        "expert_bytes": packed.expert_bytes,
        "cold": cold,
        "pays_from": rates.pays_from(
            cold, layer.wrapper.num_experts_per_tok * cold / layer.num_experts
        ),
        "bus_seconds": rates.expert_on_bus * cold * len(model.layers),
    }


def cpu_rates(shape: Any) -> list[dict[str, float]]:
    """Seconds of a layer on the CPU, by tokens per expert, from tensors on the CPU and the GPU."""
    import torch

    wrapper = newest().layers[0].wrapper
    rows = []
    for each in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        tokens = each * shape.experts // shape.top_k
        row: dict[str, float] = {"tokens": tokens, "tokens_per_expert": each}
        for device in ("cpu", "cuda"):
            x = torch.randn(tokens, shape.hidden, device=device).bfloat16()
            ids = torch.arange(tokens * shape.top_k, device=device, dtype=torch.int32)
            ids = ids.remainder(shape.experts).view(tokens, -1)
            weights = torch.full(ids.shape, 0.1, device=device)
            slots = torch.full((shape.experts,), -1, dtype=torch.int32, device=device)
            taken = []
            for _ in range(6):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                wrapper.submit_and_split(x, ids, weights, slot_map=slots, cold_slot=-1, defer=False)
                wrapper.sync_forward(x)
                torch.cuda.synchronize()
                taken.append(time.perf_counter() - begin)
            row[device] = min(taken[1:])
        rows.append(row)
    return rows


def beside(bench: Bench, engine: Any, streams: int = 4, prompts: int = 6) -> dict[str, Any]:
    """Seconds between the tokens of requests that decode while long prompts come (vLLM)."""
    from vllm import SamplingParams

    def ask(name: str, tokens: int, steps: int) -> None:
        sampling = SamplingParams(
            temperature=0, max_tokens=steps, min_tokens=steps, ignore_eos=True, detokenize=False
        )
        engine.add_request(name, {"prompt_token_ids": bench.prompt(tokens)}, sampling)

    found: dict[str, Any] = {}
    for mode in (CPU, SHARED):
        bench.set(mode)
        steps = 60 * (prompts + 1)
        for i in range(streams):
            ask(f"{mode} stream {i}", 32, steps)
        gaps, last, count, sent = [], None, 0, 0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.monotonic()
            if any("stream" in output.request_id for output in outputs):
                count += 1
                if last is not None and count > 20:
                    gaps.append(now - last)
                last = now
            if count >= 60 * (sent + 1) and sent < prompts:
                ask(f"{mode} prompt {sent}", 8192, 1)
                sent += 1
        gaps.sort()
        found[mode] = {
            "tokens": len(gaps),
            "prompts": sent,
            "p50": gaps[len(gaps) // 2],
            "p99": gaps[int(len(gaps) * 0.99)],
            "max": gaps[-1],
        }
    return found


def _memory() -> dict[str, int]:
    import torch

    with open("/proc/self/status") as file:
        status = dict(line.split(":", 1) for line in file)
    return {
        "resident": int(status["VmRSS"].split()[0]) << 10,
        "device_used": torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0],
        "torch_allocated": torch.cuda.memory_allocated(),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "most_resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def many(bench: Bench, count: int, tokens: int = 4096) -> dict[str, Any]:
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


def cancelled(bench: Bench, engine: Any, count: int = 20) -> dict[str, Any]:
    """Prompts that are cancelled after one of their chunks, beside a request that goes on: its
    tokens must be those that it gets alone."""
    from vllm import SamplingParams

    bench.set(SHARED)
    prompt = bench.prompt(600)

    def tokens_beside(prompts: int) -> list[int]:
        sampling = SamplingParams(
            temperature=0, max_tokens=64, min_tokens=64, ignore_eos=True, detokenize=False
        )
        one = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        engine.add_request("kept", {"prompt_token_ids": prompt}, sampling)
        tokens: list[int] = []
        sent = 0
        while engine.has_unfinished_requests():
            if tokens and sent < prompts:
                engine.add_request(
                    f"cancelled {sent}", {"prompt_token_ids": bench.prompt(20000)}, one
                )
            outputs = engine.step()
            for output in outputs:
                if output.request_id.startswith("kept"):
                    tokens = list(output.outputs[0].token_ids)
            if tokens and sent < prompts:
                engine.abort_request([f"cancelled {sent}"])
                sent += 1
        return tokens

    alone, before = tokens_beside(0), _memory()
    found = tokens_beside(count)
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


def more(bench: Bench, engine: Any, args: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """What else was asked for, by name."""
    if args.rates:
        yield "cpu", cpu_rates(args.shape)
    if args.beside:
        yield "beside", beside(bench, engine)
    if args.cancelled:
        yield "cancelled", cancelled(bench, engine)
    if args.many:
        yield "many", many(bench, args.many)


def summary(found: dict[str, Any], bus_seconds: float | None) -> list[str]:
    """A line for each length: milliseconds by mode, and the share of the bound."""
    lines = []
    for tokens, modes in found.items():
        times = {mode: median(row["seconds"]) for mode, row in modes.items()}
        cells = [f"{mode} {1e3 * seconds:.1f}" for mode, seconds in times.items()]
        if bus_seconds is not None and NO_COPIES in times:
            bound = max(bus_seconds * -(-int(tokens) // 8192), times[NO_COPIES])
            cells.append(f"bound {1e3 * bound:.1f}")
            cells.append(f"share {bound / times[SHARED]:.0%}")
        lines.append(f"{tokens} tokens, ms: " + ", ".join(cells))
    return lines


def serve(args: argparse.Namespace, result: dict[str, Any], folder: Path) -> None:
    import engine_run
    from synthetic import make, make_fp8

    generator = {"vllm": engine_run.vllm_generator, "sglang": engine_run.sglang_generator}
    model = make(folder / "model", args.shape, args.layers, VOCABULARY)
    begun = time.monotonic()
    for number, (method, hot, lengths) in enumerate(args.configurations):
        left = args.seconds - (time.monotonic() - begun)
        if left < 40:
            print(f"no time left for {method} {hot:.0%} hot", flush=True)
            continue
        weights = model
        if method == "FP8":
            weights = make_fp8(folder / "fp8", args.shape, args.layers)
        os.environ["KT_CONFIG"] = json.dumps(
            {
                "method": method,
                "num_gpu_experts": round(hot * args.shape.experts),
                "weight_path": str(weights),
                "gpu_prefill_token_threshold": THRESHOLD,
            }
        )
        row: dict[str, Any] = {"method": method, "hot": hot}
        start = time.monotonic()
        mode = Path(os.environ[stream_modes.VARIABLE])
        mode.write_text(SHARED)
        with generator[args.engine](str(model), ENGINES[args.engine] | args.arguments) as given:
            row["start_seconds"] = time.monotonic() - start
            bench = Bench(given[0], mode, args)
            if args.engine == "vllm":
                row["rates"] = rates_of_model()
                print(json.dumps(row), flush=True)
            row["prompts"] = bench.first_token(lengths)
            bus = row["rates"]["bus_seconds"] if "rates" in row else None
            print(f"{method} {hot:.0%} hot", *summary(row["prompts"], bus), sep="\n", flush=True)
            if args.engine == "vllm" and number == 0:
                for name, found in more(bench, given[2], args):
                    row[name] = found
                    print(name, json.dumps(found), flush=True)
            result["rows"].append(row)
            args.json.write_text(json.dumps(result, indent=1) + "\n")
            if number + 1 == len(args.configurations):
                os._exit(0)  # engines take long to end, and everything is saved


def configuration(text: str) -> tuple[str, float, list[int]]:
    """METHOD:HOT:TOKENS,TOKENS"""
    method, hot, lengths = text.split(":")
    return method, float(hot), [int(tokens) for tokens in lengths.split(",")]


def main() -> None:
    from machine import about
    from shapes import parse_shape

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--engine", required=True, choices=tuple(ENGINES))
    add("--shape", default="qwen3-30b-a3b", type=parse_shape, help="a name, or E,H,I,k")
    add("--layers", type=int, default=8)
    add(
        "--configurations",
        nargs="+",
        type=configuration,
        default=[configuration("INT4_G32:0:512,1024,2048,8192,32768")],
        help="METHOD:HOT:TOKENS,TOKENS",
    )
    add("--modes", nargs="+", choices=tuple(MODES), default=list(MODES))
    add("--rounds", type=int, default=3)
    add("--arguments", default="{}", type=json.loads, help="more arguments of the engine, as JSON")
    add("--beside", action="store_true")
    add("--cancelled", action="store_true")
    add("--rates", action="store_true")
    add("--many", type=int, default=0, help="how many long prompts")
    add("--seconds", type=float, default=1e9, help="no configuration begins 40 s before this ends")
    add("--json", type=Path, required=True, help="saved after each configuration")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **about(),
        "engine": args.engine,
        "shape": args.shape._asdict(),
        "layers": args.layers,
        "rounds": args.rounds,
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ[stream_modes.VARIABLE] = str(Path(folder) / "mode")
        Path(os.environ[stream_modes.VARIABLE]).write_text(SHARED)
        stream_modes.install(Path(os.environ[stream_modes.VARIABLE]))
        serve(args, result, Path(folder))


if __name__ == "__main__":
    main()
