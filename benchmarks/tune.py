"""Compares what `kt tune` predicts with what vLLM does, and its choice with the best one found.

    ENV/bin/python benchmarks/tune.py --json FILE

Run it in vLLM's environment, on a machine with a GPU. The model has the experts of --shape,
--layers layers and random weights. First the machine is measured as kt tune does, and vLLM itself
with all experts of two layers on the GPU. Then each of --configurations, METHOD:PART:THREADS, is
served and timed. PART is the share of hot experts; THREADS is --kt-cpuinfer, or "default". Tokens
are sampled, because greedy ones may repeat, and with them their experts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from engine_run import vllm_generator
from in_memory import VOCABULARY, serve_experts_from_memory, weights_without_experts
from machine import about
from prompts import ENGINES
from safetensors.torch import save_file
from shapes import Shape, parse_shape
from synthetic import config

from kt_kernel.runtime.pools import plan_pools
from kt_kernel.tuning.choice import Candidate, Goal, HotChoice, Limits, predict
from kt_kernel.tuning.cpu import CpuBench
from kt_kernel.tuning.engine import USUAL, measure_engine
from kt_kernel.tuning.gpu import measure_gpu
from kt_kernel.tuning.model import Load, TimeModel
from kt_kernel.tuning.rates import CpuRates
from kt_kernel.tuning.shape import Shape as ModelShape
from kt_kernel.tuning.shape import as_config, shape_of
from kt_kernel.weights.methods import get_method

STREAMS, PROMPTS = (1, 4, 16), (2048, 8192)
CONTEXT, STEPS = 32, 48
LAYERS = 2  # of the model that measures vLLM itself
GOALS = (Goal(2048, 256, 1), Goal(2048, 256, 4), Goal(8192, 64, 1), Goal(2048, 256, 16))


class Configuration(NamedTuple):
    """Served options. hot: a share of the experts. threads: None for kt-moe's number."""

    method: str
    hot: float
    threads: int | None

    @classmethod
    def parse(cls, text: str) -> Configuration:
        method, hot, threads = text.split(":")
        return cls(method, float(hot), None if threads == "default" else int(threads))


class Timed:
    """An engine that serves a model: times as in `kt_kernel.tuning.engine.Server`."""

    def __init__(self, generate: Callable[[list[list[int]], int], None]) -> None:
        self._generate, self._choose = generate, random.Random(0)

    def prefill(self, tokens: int) -> float:
        self._seconds(1, tokens, 1)
        return median(self._seconds(1, tokens, 1) for _ in range(3))

    def decode(self, streams: int, context: int = CONTEXT, steps: int = STEPS) -> float:
        self._seconds(streams, context, 12)
        found = []
        for _ in range(3):
            first = self._seconds(streams, context, 1)
            found.append((self._seconds(streams, context, steps + 1) - first) / steps)
        return median(found)

    def _seconds(self, count: int, tokens: int, steps: int) -> float:
        prompts = [
            [self._choose.randrange(2, VOCABULARY) for _ in range(tokens)] for _ in range(count)
        ]
        begin = time.perf_counter()
        self._generate(prompts, steps)
        return time.perf_counter() - begin


def arguments_of(**more: Any) -> dict[str, Any]:
    """Arguments of vLLM."""
    found = dict(ENGINES["vllm"]) | {"max_model_len": 8300, **more}
    sizes = {"cudagraph_capture_sizes": list(STREAMS)}
    return found | {"compilation_config": found["compilation_config"] | sizes}


def measured_engine(shape: ModelShape, device: Any, folder: Path, bench: Shape) -> Any:
    """vLLM's own part, from a small model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config(bench, LAYERS, VOCABULARY)))
    operations = TimeModel(shape, device, USUAL["vllm"]).layer_operations
    with vllm_generator(str(folder), arguments_of(load_format="dummy"), 1.0) as given:
        server: Any = Timed(given[0])
        return measure_engine("vllm", server, LAYERS, operations, device.flops, PROMPTS[-1])


def served(configuration: Configuration, experts: int, folder: Path) -> dict[str, Any]:
    """The times of a configuration."""
    options: dict[str, Any] = {
        "method": configuration.method,
        "num_gpu_experts": round(configuration.hot * experts),
        "tuned": "off",
    }
    if configuration.threads is not None:
        options["cpuinfer"] = configuration.threads
    os.environ["KT_CONFIG"] = json.dumps(options)
    begin = time.monotonic()
    with vllm_generator(str(folder), arguments_of(), 1.0) as given:
        started = time.monotonic() - begin
        engine = Timed(given[0])
        decode = {n: engine.decode(n) for n in STREAMS}
        prefill = {n: engine.prefill(n) for n in PROMPTS}
    del os.environ["KT_CONFIG"]
    return {"start_seconds": started, "decode": decode, "prefill": prefill}


def predicted(
    configurations: Sequence[Configuration], cpus: Sequence[CpuRates], model: TimeModel
) -> dict[Configuration, Candidate]:
    """The prediction of each configuration."""
    shape, limits = model.shape, Limits(1e15, (), 0)
    found = {}
    for one in configurations:
        cpu = next(c for c in cpus if (c.method, c.threads) == (one.method, one.threads))
        count = round(one.hot * shape.experts)
        size = shape.expert_weights * shape.value_bytes
        hot = HotChoice(count, Load.uniform(shape, count), "auto", size, size * count)
        (found[one],) = predict(model, [cpu], [hot], (0,), GOALS[0], limits)
    return found


def seconds(goal: Goal, decode: dict[int, float], prefill: dict[int, float]) -> float:
    """Of the goal's requests; decode: seconds of a step."""
    return goal.streams * prefill[goal.prompt] + goal.answer * decode[goal.streams]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the predictions, and how far the predicted best is from the best."""
    errors = [e for row in rows for e in row["errors"].values()]
    chosen = {}
    for goal in GOALS:
        took = [seconds(goal, row["decode"], row["prefill"]) for row in rows]
        expected = [seconds(goal, row["step"], row["predicted_prefill"]) for row in rows]
        best = took[expected.index(min(expected))]
        chosen[f"{goal.prompt}+{goal.answer}, {goal.streams} streams"] = best / min(took)
    return {
        "worst_error": max(map(abs, errors)),
        "median_error": median(map(abs, errors)),
        "predictions": len(errors),
        "chosen_to_best": chosen,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=parse_shape, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--configurations",
        nargs="+",
        type=Configuration.parse,
        default=[
            Configuration.parse(text)
            for text in (
                "INT4_G32:0:default INT4_G32:0.5:default AMXINT8:0.25:12 BF16:0:default "
                "INT4_G32:0:8 AMXINT8:0.5:default INT4_G32:0.25:15 BF16:0.5:12"
            ).split()
        ],
    )
    parser.add_argument(
        "--usual", action="store_true", help="do not measure vLLM itself; its usual values count"
    )
    parser.add_argument("--seconds", type=float, default=600, help="start nothing new after that")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    begin = time.monotonic()
    bench: Shape = args.shape
    shape = shape_of(bench.name, as_config(config(bench, args.layers, VOCABULARY)))
    device = measure_gpu(shape, torch.device("cuda"))
    print(json.dumps(asdict(device)), flush=True)
    cpus = []
    for method, threads in dict.fromkeys((c.method, c.threads) for c in args.configurations):
        form = get_method(method).layer_form
        assert form is not None
        plan = plan_pools(threads, None, None)
        cpus.append(CpuBench(shape, method, form, plan, threads).rates())
        print(plan.describe(), json.dumps(asdict(cpus[-1])), flush=True)
    torch.cuda.empty_cache()
    result: dict[str, Any] = {
        "machine": about(),
        "shape": bench._asdict(),
        "layers": args.layers,
        "tuning_seconds": time.monotonic() - begin,
        "device": asdict(device),
        "cpus": [asdict(cpu) for cpu in cpus],
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as place:
        engine = USUAL["vllm"]
        if not args.usual:
            engine = measured_engine(shape, device, Path(place) / "small", bench)
        result |= {"engine": asdict(engine), "engine_seconds": time.monotonic() - begin}
        print(json.dumps(result["engine"]), flush=True)
        args.json.write_text(json.dumps(result, indent=1))
        model = TimeModel(shape, device, engine, CONTEXT + STEPS // 2)
        expected = predicted(args.configurations, cpus, model)
        folder = Path(place) / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config(bench, args.layers, VOCABULARY)))
        save_file(weights_without_experts(bench, args.layers), folder / "model.safetensors")
        serve_experts_from_memory(bench, args.layers)
        for one in args.configurations:
            if time.monotonic() - begin > args.seconds:
                break
            row: dict[str, Any] = {**one._asdict(), **served(one, bench.experts, folder)}
            candidate = expected[one]
            row["step"] = {n: n / rate for n, rate in candidate.decode.items()}
            row["predicted_prefill"] = dict(candidate.prefill)
            row["streaming_from"] = candidate.streaming
            row["errors"] = {
                **{f"{n} streams": row["step"][n] / row["decode"][n] - 1 for n in STREAMS},
                **{
                    f"{n} tokens": row["predicted_prefill"][n] / row["prefill"][n] - 1
                    for n in PROMPTS
                },
            }
            result["rows"].append(row)
            result |= summary(result["rows"])
            print(json.dumps(row), flush=True)
            args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps({name: result.get(name) for name in summary(result["rows"])}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # engines take long to end, and everything is saved


if __name__ == "__main__":
    main()
