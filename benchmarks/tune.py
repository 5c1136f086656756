"""Compares what `kt tune` predicts with what vLLM does, and its choice with the best one found.

    ENV/bin/python benchmarks/tune.py --json FILE
    ENV/bin/python benchmarks/tune.py --again FILE --json OTHER

Run it in vLLM's environment, on a machine with a GPU. The model has the experts of --shape,
--layers layers and random weights. First the machine is measured as kt tune does, and vLLM itself
with all experts of two layers on the GPU. Then each of --configurations, METHOD:PART:THREADS, is
served and timed; PART is the share of hot experts, THREADS is --kt-cpuinfer or "default", and
"stock" has all experts on the GPU. --together engines load at the same time, and are timed one by
one. With --again, the times of another run are kept, and predicted by the present model.

Tokens are sampled, and the model's attention adds nothing to its hidden states: with random weights
its tokens would otherwise select the same experts again and again.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from outputs import output_file, save_result

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or a process that forks initialises CUDA

import torch
from engine_run import vllm_generator
from in_memory import VOCABULARY, serve_experts_from_memory, weights_without_experts
from machine import about
from prompts import ENGINES
from safetensors.torch import save_file
from shapes import Shape, parse_shape
from synthetic import config
from waves import Quiet, Wave

from kt_kernel.runtime.pools import plan_pools
from kt_kernel.tuning.choice import Candidate, Goal, HotChoice, Limits, predict
from kt_kernel.tuning.cpu import CpuBench, host_rates
from kt_kernel.tuning.engine import USUAL
from kt_kernel.tuning.gpu import measure_gpu
from kt_kernel.tuning.model import Load, TimeModel
from kt_kernel.tuning.rates import CpuRates, EngineRates, GpuRates, HostRates
from kt_kernel.tuning.shape import Shape as ModelShape
from kt_kernel.tuning.shape import as_config, shape_of
from kt_kernel.tuning.small_engine import measure_small, small_shape
from kt_kernel.weights.methods import get_method

STREAMS, PROMPTS = (1, 4, 16), (2048, 8192)
CONTEXT, STEPS, ROUNDS = 32, 32, 5
SMALL, STOCK = "small", "stock"
GOALS = (Goal(2048, 256, 1), Goal(2048, 256, 4), Goal(8192, 64, 1), Goal(2048, 256, 16))
GPU_PART = 60 << 30  # bytes of the GPU, half of which the small model may take
SETTLE = 0.5  # seconds of decoding before an engine is timed
# Of vLLM, before processes are forked.
IMPORTED = (
    "vllm.entrypoints.llm",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.models.qwen3_moe",
)
LIMIT = 150.0  # seconds in which engines start, and in which one is timed


class Configuration(NamedTuple):
    """Served options. hot: a share of the experts. threads: None for kt-moe's number."""

    method: str
    hot: float = 1.0
    threads: int | None = None

    @classmethod
    def parse(cls, text: str) -> Configuration:
        if text == STOCK:
            return cls(STOCK)
        method, hot, threads = text.split(":")
        return cls(method, float(hot), None if threads == "default" else int(threads))

    def __str__(self) -> str:
        if self.method in (STOCK, SMALL):
            return self.method
        return f"{self.method}:{self.hot:g}:{self.threads or 'default'}"


class Timed:
    """An engine that serves a model: times as in `kt_kernel.tuning.engine.Server`. all: each one,
    by what was timed."""

    def __init__(self, generate: Callable[[list[list[int]], int], None]) -> None:
        self._generate, self._choose = generate, random.Random(0)
        self.all: dict[str, list[float]] = {}

    def settle(self) -> None:
        end = time.perf_counter() + SETTLE
        while time.perf_counter() < end:
            self._seconds(STREAMS[1], CONTEXT, 16)

    def prefill(self, tokens: int) -> float:
        self._seconds(1, tokens, 1)
        return self._median(f"{tokens} tokens", lambda: self._seconds(1, tokens, 1))

    def decode(self, streams: int, context: int = CONTEXT, steps: int = STEPS) -> float:
        def step() -> float:
            first = self._seconds(streams, context, 1)
            return (self._seconds(streams, context, steps + 1) - first) / steps

        self._seconds(streams, context, 12)
        return self._median(f"{streams} streams", step)

    def _median(self, name: str, timed: Callable[[], float]) -> float:
        times = [timed() for _ in range(ROUNDS)]
        self.all[name] = times
        return median(times)

    def _seconds(self, count: int, tokens: int, steps: int) -> float:
        prompts = [
            [self._choose.randrange(2, VOCABULARY) for _ in range(tokens)] for _ in range(count)
        ]
        begin = time.perf_counter()
        self._generate(prompts, steps)
        return time.perf_counter() - begin


# ---- what runs in processes of its own


def arguments_of(given: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Arguments of vLLM. The KV cache has a size, because several engines share the GPU."""
    found = dict(ENGINES["vllm"]) | {"max_model_len": PROMPTS[-1] + 64, **more}
    found |= {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 1 << 30}
    sizes = {"cudagraph_capture_sizes": list(STREAMS)}
    return found | {"compilation_config": found["compilation_config"] | sizes} | given


def served(
    one: Configuration,
    bench: Shape,
    layers: int,
    folder: Path,
    given: dict[str, Any],
    quiet: Quiet,
) -> Iterator[Any]:
    """Of `Wave`: the times of a configuration."""
    serve_experts_from_memory("vllm", bench, layers)
    if one.method != STOCK:
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        from kt_kernel.serving import streaming_start

        options = {"method": one.method, "num_gpu_experts": round(one.hot * bench.experts)}
        options |= {"cpuinfer": one.threads} if one.threads is not None else {}
        os.environ["KT_CONFIG"] = json.dumps({**options, "tuned": "off"})
        # A team packs much slower beside others. Experts are streamed as measured at the start.
        DefaultModelLoader.load_weights = quiet.alone(DefaultModelLoader.load_weights)
        streaming_start._Start.run = quiet(streaming_start._Start.run)  # type: ignore[method-assign]
    with vllm_generator(str(folder), arguments_of(given), 1.0) as (generate, *_):
        yield
        engine = Timed(generate)
        engine.settle()
        found = {
            "decode": {str(n): engine.decode(n) for n in STREAMS},
            "prefill": {str(n): engine.prefill(n) for n in PROMPTS},
        }
        yield found | {"all": engine.all}


def small(
    part: ModelShape, device: GpuRates, folder: Path, given: dict[str, Any], quiet: Quiet
) -> Iterator[Any]:
    """Of `Wave`: vLLM's own part, from a small model."""
    more = arguments_of(given, load_format="dummy")
    with vllm_generator(str(folder), more, 1.0) as (generate, *_):
        yield
        engine: Any = Timed(generate)
        engine.settle()
        found = measure_small("vllm", engine, part, device, PROMPTS[-1])
        yield asdict(found) | {"all": engine.all}


def measured(
    bench: Shape, layers: int, cpus: Sequence[tuple[str, int | None]], folder: Path, quiet: Quiet
) -> Iterator[Any]:
    """Of `Wave`: the machine, as kt tune measures it. Also writes the weights besides the
    experts."""
    shape, begin = model_shape(bench, layers), time.monotonic()
    gpu = torch.cuda.is_available()
    weights = weights_without_experts(bench, layers, attention=0.0)
    save_file(weights, folder / "model.safetensors")
    device: Any = measure_gpu(shape, torch.device("cuda")) if gpu else HostRates(*host_rates())
    found: dict[str, Any] = {"device": asdict(device), "cpus": []}
    for method, threads in cpus:
        form = get_method(method).layer_form
        assert form is not None
        plan = plan_pools(threads, None, None)
        found["cpus"].append(asdict(CpuBench(shape, method, form, plan, threads).rates()))
    yield
    yield found | {"tuning_seconds": time.monotonic() - begin}


def uses_gpu(quiet: Quiet) -> Iterator[Any]:
    """Of `Wave`: fails where a forked process cannot use the GPU."""
    yield
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")
    yield {}


# ---- predictions


def model_shape(bench: Shape, layers: int) -> ModelShape:
    return shape_of(bench.name, as_config(config(bench, layers, VOCABULARY)))


def from_json(kind: Any, values: dict[str, Any]) -> Any:
    """A dataclass of rates; curves are lists in JSON."""
    known = {field.name for field in fields(kind)}
    return kind(
        **{
            name: tuple(map(tuple, value)) if isinstance(value, list) else value
            for name, value in values.items()
            if name in known
        }
    )


def predicted(
    one: Configuration, cpus: Sequence[CpuRates], model: TimeModel
) -> tuple[dict[str, float], dict[str, float], int | None]:
    """(seconds of a step by streams, seconds to the first token by tokens, tokens from which
    experts are streamed)."""
    shape, limits = model.shape, Limits(1e15, (), 0)
    wanted = [c for c in cpus if (c.method, c.threads) == (one.method, one.threads)]
    cpu = cpus[0] if one.method == STOCK else wanted[0]
    count = round(one.hot * shape.experts)
    size = shape.expert_weights * shape.value_bytes
    hot = HotChoice(count, Load.uniform(shape, count), "auto", size, size * count)
    found: list[Candidate] = predict(model, [cpu], [hot], (0,), GOALS[0], limits)
    steps = {str(n): n / rate for n, rate in found[0].decode.items()}
    return steps, {str(n): seconds for n, seconds in found[0].prefill.items()}, found[0].streaming


def device_kind(result: dict[str, Any]) -> type:
    """GpuRates, or HostRates on a machine without a GPU."""
    return GpuRates if "bus" in result["device"] else HostRates


def with_predictions(result: dict[str, Any]) -> dict[str, Any]:
    """The result with the predictions of each row, their errors, and a summary."""
    bench = Shape(**result["shape"])
    model = TimeModel(
        model_shape(bench, result["layers"]),
        from_json(device_kind(result), result["device"]),
        from_json(EngineRates, result["engine"]),
        CONTEXT + STEPS // 2,
    )
    cpus = [from_json(CpuRates, cpu) for cpu in result["cpus"]]
    rows = []
    for row in result["rows"]:
        if "error" in row:
            rows.append(row)
            continue
        step, first, begin = predicted(Configuration.parse(row["configuration"]), cpus, model)
        errors = {
            **{f"{n} streams": step[n] / row["decode"][n] - 1 for n in row["decode"]},
            **{f"{n} tokens": first[n] / row["prefill"][n] - 1 for n in row["prefill"]},
        }
        rows.append(
            row
            | {"step": step, "predicted_prefill": first, "streaming_from": begin, "errors": errors}
        )
    return result | {"rows": rows} | summary([row for row in rows if "errors" in row])


def seconds(goal: Goal, decode: dict[str, float], prefill: dict[str, float]) -> float:
    """Of the goal's requests; decode: seconds of a step."""
    return goal.streams * prefill[str(goal.prompt)] + goal.answer * decode[str(goal.streams)]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the predictions, and how far the predicted best is from the best."""
    if not rows:
        return {}
    errors = [abs(e) for row in rows for e in row["errors"].values()]
    chosen = {}
    for goal in GOALS:
        took = [seconds(goal, row["decode"], row["prefill"]) for row in rows]
        expected = [seconds(goal, row["step"], row["predicted_prefill"]) for row in rows]
        best = took[expected.index(min(expected))]
        chosen[f"{goal.prompt}+{goal.answer}, {goal.streams} streams"] = best / min(took)
    return {
        "worst_error": max(errors),
        "median_error": median(errors),
        "within_15_percent": sum(error <= 0.15 for error in errors),
        "predictions": len(errors),
        "chosen_to_best": chosen,
    }


def line(row: dict[str, Any]) -> str:
    if "errors" not in row:
        return f"{row['configuration']}: {row['error'].strip().splitlines()[-1][:150]}"
    times = [f"{1e3 * t:.2f}" for t in (*row["decode"].values(), *row["prefill"].values())]
    errors = [f"{error:+.0%}" for error in row["errors"].values()]
    return f"{row['configuration']}: ms {' '.join(times)}; predicted {' '.join(errors)}"


# ---- the run


class Run:
    """All of it. The result is saved whenever it grows."""

    def __init__(self, args: argparse.Namespace, place: Path) -> None:
        self._args, self._place, self._begin = args, place, time.monotonic()
        self._bench: Shape = args.shape
        self._result: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "shape": self._bench._asdict(),
            "layers": args.layers,
            "context": CONTEXT,
            "steps": STEPS,
            "rows": [],
        }

    def run(self) -> None:
        model, few = self._place / "model", self._place / "small"
        shape = model_shape(self._bench, self._args.layers)
        part = small_shape(shape, GPU_PART)
        for folder, layers in ((model, shape.layers), (few, part.layers)):
            folder.mkdir()
            content = config(self._bench, layers, VOCABULARY)
            (folder / "config.json").write_text(json.dumps(content))
        left: list[Configuration] = list(self._args.configurations)
        cpus = [(one.method, one.threads) for one in left if one.method != STOCK]
        task = measured, (self._bench, self._args.layers, list(dict.fromkeys(cpus)), model)
        machine = Wave([("measured", *task)], self._args.start, LIMIT)
        for name in IMPORTED:
            importlib.import_module(name)
        version = importlib.metadata.version("vllm")
        self._result |= {"machine": about(), "engine_version": version}
        self._say("vLLM is imported")
        ((_, found),) = machine
        if "error" in found:
            raise RuntimeError(found["error"])
        self._result |= found
        self._say(f"measured: {json.dumps(found['device'])}")
        self._check_fork()
        more = self._args.arguments
        tasks: list[Any] = []
        if self._args.usual:
            self._result["engine"] = asdict(USUAL["vllm"])
        else:
            device = from_json(device_kind(self._result), self._result["device"])
            tasks.append((SMALL, small, (part, device, few, more)))
        while left or tasks:
            if time.monotonic() - self._begin > self._args.seconds:
                self._say(f"no time left for {' '.join(map(str, left))}")
                break
            count = self._args.together - len(tasks)
            now, left = left[:count], left[count:]
            tasks += [
                (str(one), served, (one, self._bench, self._args.layers, model, more))
                for one in now
            ]
            self._wave(tasks, sum(one.method != STOCK for one in now))
            tasks = []

    def _check_fork(self) -> None:
        """Processes are spawned if what was imported has begun to use the GPU."""
        ((_, found),) = Wave([("uses the GPU", uses_gpu, ())], self._args.start, LIMIT)
        if "error" in found:
            self._say(f"spawning processes, which import vLLM again: {found['error'][-200:]}")
            self._args.start = "spawn"

    def _wave(self, tasks: Sequence[Any], measured: int) -> None:
        for name, found in Wave(tasks, self._args.start, LIMIT, measured):
            if name == SMALL:
                self._result["engine"] = found
                shown = json.dumps({k: found.get(k) for k in ("step", "launch", "share", "error")})
            else:
                self._result["rows"].append({"configuration": name, **found})
            if "error" not in self._result["engine"]:
                self._result = with_predictions(self._result)
            if name != SMALL:
                shown = line(self._result["rows"][-1])
            self._say(f"{name} after {found.get('start_seconds', 0):.0f} s: {shown}")

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begin:.0f} s] {text}", flush=True)
        save_result(self._args.json, self._result)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", type=parse_shape, default="qwen3-30b-a3b")
    add("--layers", type=int, default=8)
    add(
        "--configurations",
        nargs="+",
        type=Configuration.parse,
        default=[
            Configuration.parse(text)
            for text in (
                "INT4_G32:0:default INT4_G32:0.5:default AMXINT8:0.25:12 BF16:0.5:default "
                "INT4_G32:0.25:8 stock AMXINT8:0:default BF16:0:12 INT4_G32:0.75:default "
                "AMXINT8:0.5:8 INT4_G32:0.5:12"
            ).split()
        ],
    )
    add("--usual", action="store_true", help="do not measure vLLM itself; its usual values count")
    add("--together", type=int, default=6, help="engines that load at the same time")
    add(
        "--start",
        choices=("fork", "spawn"),
        default="fork",
        help="how processes begin; forked ones need not import vLLM again",
    )
    add("--arguments", type=json.loads, default={}, help="more arguments of vLLM, as JSON")
    add("--seconds", type=float, default=600, help="start nothing new after that")
    add("--again", type=Path, metavar="FILE", help="a result, to be predicted again")
    add("--json", type=output_file, required=True)
    args = parser.parse_args()
    if args.again is not None:
        result = with_predictions(json.loads(args.again.read_text()))
        print(*map(line, result["rows"]), sep="\n")
        save_result(args.json, result)
    else:
        with tempfile.TemporaryDirectory() as place:
            run = Run(args, Path(place))
            run.run()
        result = run._result
    keys = "worst_error", "median_error", "within_15_percent", "predictions", "chosen_to_best"
    print(json.dumps({key: result.get(key) for key in keys}), flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
