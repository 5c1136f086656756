"""Decodes in vLLM with routes of a given locality: fixed placements, and the live expert cache.

    ENV/bin/python benchmarks/cache.py --json FILE --shape deepseek-v3 --layers 4

Run it in vLLM's environment, on a machine with a GPU. The model has random weights, and every
expert has the same ones. Its router's choice is replaced by generated routes: "local" has the
locality that was published for Qwen3-30B-A3B, "shifted" too, with other experts, and "none" has
none (kt_kernel.routes.synthetic). One engine serves everything: it has slots for the largest share
of --resident, and for smaller shares some stay empty. The fixed placement is the first experts of
each layer; it runs the cache's kernel, too, and moves nothing. Each row has the times between
tokens, and the hit rate.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import numpy as np
from cache_control import FIXED, MOVING, Control, about_engine
from in_memory import VOCABULARY, serve_experts_from_memory, weights_without_experts
from outputs import output_file
from prompts import ENGINES
from route_table import RouteTable
from safetensors.torch import save_file
from shapes import Shape, parse_shape
from synthetic import config

from kt_kernel.routes.record import RouteRecord
from kt_kernel.routes.simulator import as_streams
from kt_kernel.routes.synthetic import NONE, QWEN3_30B, generate
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.weights.expert_tensors import MATRICES
from kt_kernel.weights.packed import packed_shape

ROUTES = 8192  # tokens of which routes are generated; then they begin again
WARM = {FIXED: 16, MOVING: 400}  # tokens before those that are timed, of all streams
LEAST_WARM = 16  # of each stream
SHIFTED = (32, 32, 64, 128)  # tokens of each row after the load has shifted


def serve_first_expert_from_memory(shape: Shape, layers: int) -> None:
    """vLLM's loader also delivers the first expert of each layer, and the others get its packed
    weights. Slots get theirs from the CPU when the cache starts."""
    serve_experts_from_memory(shape, layers, experts=1)
    HybridLayer.finish_loading = _finish_loading  # type: ignore[method-assign]


def _finish_loading(layer: HybridLayer, original: Any = HybridLayer.finish_loading) -> None:
    every = range(layer.num_experts)
    assert layer._loading is not None
    _copy_first_expert(layer)
    layer._loading._packed.update(every)
    layer.wrapper._arrived.update(every)
    if layer.hot is not None:
        layer.hot._arrived.update((slot, which) for slot in every for which in MATRICES)
    original(layer)


def _copy_first_expert(layer: HybridLayer) -> None:
    """Every other expert gets the packed weights of the first one."""
    core, forms = layer.wrapper._core, layer.wrapper._form
    hidden, inter = layer.hidden_size, layer.moe_intermediate_size
    shapes = (inter, hidden), (inter, hidden), (hidden, inter)
    matrices = []
    for number, (form, shape) in enumerate(zip(forms, shapes, strict=True)):
        matrices.append(np.empty(packed_shape(form, *shape), np.uint8))
        core.save_packed(0, number, matrices[-1])
    for expert in range(1, layer.num_experts):
        core.load_packed(expert, *matrices)


class Routes:
    """Generated or recorded routes in place of the routers' choice."""

    def __init__(self, args: argparse.Namespace) -> None:
        sizes = {"experts": args.shape.experts, "per_token": args.shape.top_k}
        self._records = {
            name: generate(replace(locality, **sizes), ROUTES, args.layers, seed)
            for name, locality, seed in (
                ("local", QWEN3_30B, 0),
                ("shifted", QWEN3_30B, 1),
                ("none", NONE, 0),
            )
        }
        self.names = "local", "none"  # of those to compare
        if args.record is not None:
            self._records = {"recorded": args.record}
            self.names = ("recorded",)
        self._table = RouteTable(next(iter(self._records.values())))
        self._table.install()

    def use(self, name: str, streams: int) -> None:
        """The next tokens have these routes."""
        self._table.use(as_streams(self._records[name], streams))


class Bench:
    """An engine with its cache."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        from vllm import LLM, SamplingParams

        from kt_kernel.serving import cache as caches

        shape: Shape = args.shape
        (folder / "config.json").write_text(json.dumps(config(shape, args.layers, VOCABULARY)))
        save_file(weights_without_experts(shape, args.layers), folder / "model.safetensors")
        serve_first_expert_from_memory(shape, args.layers)
        self.routes, self._params = Routes(args), SamplingParams
        options = {
            "method": args.method,
            "num_gpu_experts": round(max(args.resident) * shape.experts),
            "enable_dynamic_expert_update": "on",
            "hot_format": args.hot_format,
            "gpu_prefill_token_threshold": 0,  # prompts are short
        }
        arguments: dict[str, Any] = dict(ENGINES["vllm"])
        arguments["compilation_config"] |= {"cudagraph_capture_sizes": [1, 4, 16]}
        arguments |= {"max_model_len": 4096, "max_num_batched_tokens": 2048}
        arguments |= {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 2 << 30}
        arguments |= {"skip_tokenizer_init": True, "seed": 0}
        self._llm = LLM(str(folder), additional_config={"kt": options}, **arguments)
        self.cache = caches._caches[-1]
        self.control = Control(self.cache)
        self._args, self._choose, self._number = args, random.Random(0), 0
        for streams in (1, *args.streams):
            self.times(8, streams)

    def times(self, steps: int, streams: int = 1) -> list[float]:
        """Seconds between the tokens, without the first of each request."""
        engine = self._llm.llm_engine
        params = self._params(
            temperature=0, max_tokens=steps, min_tokens=steps, ignore_eos=True, detokenize=False
        )
        for _ in range(streams):
            self._number += 1
            prompt = [self._choose.randrange(2, VOCABULARY) for _ in range(8)]
            engine.add_request(str(self._number), {"prompt_token_ids": prompt}, params)
        times, last = [], time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
            now = time.perf_counter()
            times.append(now - last)
            last = now
        return times[2:]

    def measure(
        self, routes: str, resident: float, mode: str, streams: int, rate: float | None = None
    ) -> dict[str, Any]:
        """A row of the result. rate: of uploads; None: the cache's own."""
        given = self.cache.rate
        self.cache.rate = given if rate is None else rate
        self._begin(routes, resident, mode, streams)
        row = {"routes": routes, "resident": resident, "mode": mode, "streams": streams}
        row |= {"rate": self.cache.rate} | self._timed(self._args.steps, streams)
        self.control.mode = FIXED
        self.cache.rate = given
        return row

    def _begin(self, routes: str, resident: float, mode: str, streams: int) -> None:
        """Decodes some tokens that are not timed."""
        slots = round(resident * self._args.shape.experts)
        self.control.reset(slots, lambda: self.times(3))
        self.routes.use(routes, streams)
        self.control.mode = mode
        self.times(max(WARM[mode] // streams, LEAST_WARM), streams)

    def _timed(self, steps: int, streams: int = 1) -> dict[str, Any]:
        before = self.control.counters()
        times = sorted(self.times(steps, streams))
        after = self.control.counters()
        count = {name: after[name] - before[name] for name in after}
        return {
            "tokens_s": streams * len(times) / sum(times),
            "p50_ms": 1e3 * times[len(times) // 2],
            "p99_ms": 1e3 * times[int(len(times) * 0.99)],
            "hit_rate": count["cache_hits"] / (count["cache_hits"] + count["cache_misses"]),
            "uploads": count["cache_uploads"] / (len(times) * self._args.layers),
            "gain": self.cache._gain.mean,
        }

    def shift(self, resident: float) -> Iterator[dict[str, Any]]:
        """Rows of the cache after the load has shifted to other experts, in the order of time."""
        self._begin("local", resident, MOVING, 1)
        self.routes.use("shifted", 1)
        for steps in SHIFTED:
            row = {"routes": "shifted", "resident": resident, "mode": MOVING, "streams": 1}
            yield row | {"rate": self.cache.rate, "steps": steps} | self._timed(steps)
        self.control.mode = FIXED


def arguments(about: str, resident: list[float]) -> argparse.Namespace:
    """The command's arguments. resident: the default."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--shape", type=parse_shape, default="deepseek-v3")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--method", default="INT4_G32")
    parser.add_argument("--hot-format", default="engine", help="of hot experts: engine or packed")
    parser.add_argument("--resident", type=float, nargs="+", default=resident)
    parser.add_argument("--streams", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--rates",
        type=float,
        nargs="*",
        default=[],
        help="GB/s, tried in addition with local routes",
    )
    parser.add_argument(
        "--record",
        type=Path,
        help="recorded routes (--record-kt-expert-routes) in place of generated ones; their "
        "numbers of experts replace those of --shape",
    )
    parser.add_argument("--steps", type=int, default=256, help="tokens of each stream")
    parser.add_argument("--json", type=output_file, required=True)
    args = parser.parse_args()
    if args.record is not None:
        record = args.record = RouteRecord.load(args.record).decoded
        if args.layers > len(record.layers):
            parser.error(f"--layers {args.layers}: the record has {len(record.layers)}")
        args.shape = args.shape._replace(
            experts=record.model.num_experts, top_k=record.routes.shape[2]
        )
    return args


def main() -> None:
    args = arguments((__doc__ or "").split("\n", maxsplit=1)[0], resident=[0.12, 0.25, 0.4])
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
    rows: list[dict[str, Any]] = []
    result = {
        **about_engine(),
        "shape": args.shape._asdict(),
        "layers": args.layers,
        "hot_format": args.hot_format,
        "rows": rows,
    }
    result |= {"method": args.method, "expert_bytes": bench.cache.layers[0].packed.expert_bytes}
    for routes in bench.routes.names:
        for resident in args.resident:
            for streams in args.streams:
                tried = [(FIXED, None), (MOVING, None)]
                if routes == "local":
                    tried += [(MOVING, rate * 1e9) for rate in args.rates]
                for mode, rate in tried:
                    rows.append(bench.measure(routes, resident, mode, streams, rate))
                    print(json.dumps(rows[-1]), flush=True)
                    args.json.write_text(json.dumps(result, indent=1))
    shifted = [] if args.record else bench.shift(args.resident[len(args.resident) // 2])
    for row in shifted:
        rows.append(row)
        print(json.dumps(row), flush=True)
        args.json.write_text(json.dumps(result, indent=1))
    sys.stdout.flush()
    os._exit(0)  # engines take long to end, and everything is saved


if __name__ == "__main__":
    main()
