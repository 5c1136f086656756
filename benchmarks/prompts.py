"""Times prompts in a stock engine: cold experts on the CPU, streamed to the GPU, or shared.

    ENV/bin/python benchmarks/prompts.py --engine vllm --json FILE \\
        --configurations INT4_G32:0:512,8192 BF16:0.25:8192

Run it in the engine's environment. METHOD:HOT:TOKENS,... is a method, the part of the experts that
is hot, and the lengths of prompts; "stock" has everything on the GPU. Each other configuration is
served with the modes of stream_modes.py in turn, prompt after prompt. The bound is the larger of
the copies alone, at the speed measured at the start, and of the GPU alone (mode "no copies"). Also:

- mean distance of prompts' log-probabilities from the stock engine or the CPU (--logprobs)
- memory before and after many long prompts (--many)
- pauses between the tokens of requests that decode beside long prompts (--beside)
- requests that are cancelled during their prompt (--cancelled)

With vLLM, also:

- the GPU's kernels in a prompt (--profile)
- the functions in which the host spends its time (--host)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import stream_modes
from outputs import output_file, save_result
from prompts_more import (
    APART,
    TOGETHER,
    VOCABULARY,
    counters,
    distances,
    logprobs,
    more,
    rates_of_model,
)
from stream_modes import CPU, MODES, NO_COPIES, SHARED, STREAMED

if stream_modes.VARIABLE in os.environ:  # also in the processes that an engine spawns
    stream_modes.install(Path(os.environ[stream_modes.VARIABLE]))

STOCK = "stock"
_LEAST = 25  # seconds that a configuration takes
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

    def __init__(self, generate: Callable[..., None], mode: Path) -> None:
        self._generate, self._mode = generate, mode
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

    def warm(self, lengths: list[int], modes: list[str]) -> None:
        """Compiles what the first use of a size compiles."""
        for tokens in lengths:
            for mode in modes:
                self.set(mode)
                if mode != CPU or tokens <= 2048:
                    self.seconds(tokens)

    def first_token(
        self, lengths: list[int], modes: list[str], rounds: int
    ) -> dict[str, dict[str, Any]]:
        """Seconds to the first token, by length and mode, and what was streamed in vLLM."""
        found: dict[str, dict[str, Any]] = {}
        for number in range(rounds):
            for tokens in lengths:
                for mode in modes:
                    if number and mode == CPU and tokens > 8192:
                        continue  # many seconds
                    self.set(mode)
                    before, taken = counters(), self.seconds(tokens)
                    row = found.setdefault(str(tokens), {}).setdefault(mode, {"seconds": []})
                    row["seconds"].append(taken)
                    row["counted"] = {k: v - before.get(k, 0) for k, v in counters().items()}
        return found


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
    from synthetic import make

    generator = {"vllm": engine_run.vllm_generator, "sglang": engine_run.sglang_generator}
    model = make(folder / "model", args.shape, args.layers, VOCABULARY)
    begun = time.monotonic()
    spoken: dict[str, dict[str, list[float]]] = {}
    for number, (method, hot, lengths) in enumerate(args.configurations):
        left = args.seconds - (time.monotonic() - begun)
        if left < _LEAST:
            print(f"no time left for {method} {hot:.0%} hot", flush=True)
            continue
        row: dict[str, Any] = {"method": method, "hot": hot}
        os.environ.pop("KT_CONFIG", None)
        if method != STOCK:
            os.environ["KT_CONFIG"] = options(args, method, hot, model, folder)
        start = time.monotonic()
        mode = Path(os.environ[stream_modes.VARIABLE])
        mode.write_text(SHARED)
        arguments = ENGINES[args.engine] | args.arguments
        if method == STOCK:
            arguments |= args.stock
        with generator[args.engine](str(model), arguments) as given:
            row["start_seconds"] = time.monotonic() - start
            bench = Bench(given[0], mode)
            if args.engine == "vllm" and method != STOCK:
                row["rates"] = rates_of_model()
            print(json.dumps(row), flush=True)
            modes = [SHARED] if method == STOCK else args.modes
            bench.warm(lengths, modes)
            row["prompts"] = bench.first_token(lengths, modes, args.rounds)
            bus = row.get("rates", {}).get("bus_seconds")
            print(f"{method} {hot:.0%} hot", *summary(row["prompts"], bus), sep="\n", flush=True)
            if args.logprobs:
                modes = [TOGETHER, APART] if method == STOCK else args.modes
                name = f"{method} {hot:.0%}" if 0 < hot < 1 else method
                spoken[name] = logprobs(args.engine, bench, given[2], modes)
                row["distances"] = distances(spoken)
                print("log-probabilities:", json.dumps(row["distances"]), flush=True)
            if method != STOCK and not any(r["method"] != STOCK for r in result["rows"]):
                for name, found in more(bench, given[2], args):
                    row[name] = found
                    print(name, json.dumps(found), flush=True)
            result["rows"].append(row)
            save_result(args.json, result)
            if number + 1 == len(args.configurations):
                os._exit(0)  # engines take long to end, and everything is saved


def options(args: argparse.Namespace, method: str, hot: float, model: Path, folder: Path) -> str:
    """KT_CONFIG of a configuration."""
    from synthetic import make_fp8

    weights = make_fp8(folder / "fp8", args.shape, args.layers) if method == "FP8" else model
    return json.dumps(
        {
            "method": method,
            "num_gpu_experts": round(hot * args.shape.experts),
            "weight_path": str(weights),
            "gpu_prefill_token_threshold": args.threshold or "auto",
        }
    )


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
    add("--modes", nargs="+", choices=tuple(MODES), default=[CPU, STREAMED, SHARED, NO_COPIES])
    add("--threshold", type=int, help="tokens from which batches are streamed (default: measured)")
    add("--rounds", type=int, default=3)
    add("--arguments", default="{}", type=json.loads, help="more arguments of the engine, as JSON")
    add("--stock", default="{}", type=json.loads, help="other arguments of the stock engine")
    add("--beside", action="store_true")
    add("--cancelled", action="store_true")
    add("--logprobs", action="store_true", help="from those of stock, or of the CPU")
    add("--profile", type=int, default=0, help="tokens of a prompt of which kernels are timed")
    add("--host", type=int, default=0, help="tokens of a prompt of which the host is measured")
    add("--many", type=int, default=0, help="how many long prompts")
    add("--many-tokens", type=int, default=4096, help="their length")
    add(
        "--seconds",
        type=float,
        default=1e9,
        help="no configuration begins shortly before this ends",
    )
    add("--json", type=output_file, required=True, help="saved after each configuration")
    args = parser.parse_args()
    if args.engine != "vllm" and (args.profile or args.host):
        parser.error("--profile and --host measure this process, in which only vLLM runs")
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **about(),
        "engine": args.engine,
        "shape": args.shape._asdict(),
        "layers": args.layers,
        "rounds": args.rounds,
        "threshold": args.threshold,
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ[stream_modes.VARIABLE] = str(Path(folder) / "mode")
        Path(os.environ[stream_modes.VARIABLE]).write_text(SHARED)
        stream_modes.install(Path(os.environ[stream_modes.VARIABLE]))
        serve(args, result, Path(folder))


if __name__ == "__main__":
    main()
