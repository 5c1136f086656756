"""Decodes in an engine with routes of a given locality: fixed placements, and the live cache.

    ENV/bin/python benchmarks/cache.py --engine vllm --json FILE --shape deepseek-v3 --layers 4

Run it in the engine's environment, on a machine with a GPU. The model has random weights, and every
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
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cache_control import FIXED, MOVING, about_engine
from cache_model import RECORDED, write_model
from outputs import output_file, save_result
from shapes import parse_shape

from kt_kernel.routes.record import RouteRecord

WARM = {FIXED: 16, MOVING: 400}  # tokens before those that are timed, of all streams
LEAST_WARM = 16  # of each stream
SHIFTED = (32, 32, 64, 128)  # tokens of each row after the load has shifted


class Bench:
    """An engine with its cache."""

    def __init__(self, args: argparse.Namespace, engine: Any) -> None:
        self._args, self._engine = args, engine
        for streams in (1, *args.streams):
            engine.times(8, streams)
        self._rate: float | None = engine.call("state")["rate"]

    @property
    def expert_bytes(self) -> int:
        """Packed."""
        return int(self._engine.call("state")["expert_bytes"])

    def measure(
        self, routes: str, resident: float, mode: str, streams: int, rate: float | None = None
    ) -> dict[str, Any]:
        """A row of the result. rate: of uploads; None: the cache's own."""
        self._begin(routes, resident, mode, streams, rate)
        row = {"routes": routes, "resident": resident, "mode": mode, "streams": streams}
        row |= self._timed(self._args.steps, streams)
        self._engine.call("stay")
        return row

    def _begin(
        self, routes: str, resident: float, mode: str, streams: int, rate: float | None = None
    ) -> None:
        """Decodes some tokens that are not timed."""
        slots = round(resident * self._args.shape.experts)
        rate = self._rate if rate is None else rate
        self._engine.call("begin", slots, routes, streams, mode, rate)
        self._engine.times(max(WARM[mode] // streams, LEAST_WARM), streams)

    def _timed(self, steps: int, streams: int = 1) -> dict[str, Any]:
        before = self._engine.call("state")
        times = sorted(self._engine.times(steps, streams))
        after = self._engine.call("state")
        hits, misses, uploads = (
            after[name] - before[name] for name in ("cache_hits", "cache_misses", "cache_uploads")
        )
        return {
            "rate": after["rate"],
            "tokens_s": streams * len(times) / sum(times),
            "p50_ms": 1e3 * times[len(times) // 2],
            "p99_ms": 1e3 * times[int(len(times) * 0.99)],
            "hit_rate": hits / (hits + misses),
            "uploads": uploads / (len(times) * self._args.layers),
            "gain": after["gain"],
        }

    def shift(self, resident: float) -> Iterator[dict[str, Any]]:
        """Rows of the cache after the load has shifted to other experts, in the order of time."""
        self._begin("local", resident, MOVING, 1)
        self._engine.call("use", "shifted", 1)
        for steps in SHIFTED:
            row = {"routes": "shifted", "resident": resident, "mode": MOVING, "streams": 1}
            yield row | {"steps": steps} | self._timed(steps)
        self._engine.call("stay")


def arguments(about: str, resident: list[float], engines: tuple[str, ...]) -> argparse.Namespace:
    """The command's arguments. resident: the default."""
    parser = argparse.ArgumentParser(description=about)
    add = parser.add_argument
    add("--engine", choices=engines, default=engines[0])
    add("--shape", type=parse_shape, default="deepseek-v3")
    add("--layers", type=int, default=4)
    add("--method", default="INT4_G32")
    add("--hot-format", default="engine", help="of hot experts: engine or packed")
    add("--resident", type=float, nargs="+", default=resident)
    add("--streams", type=int, nargs="+", default=[1])
    add("--rates", type=float, nargs="*", default=[], help="GB/s, tried with local routes, too")
    add(
        "--record",
        type=Path,
        help="recorded routes (--record-kt-expert-routes) in place of generated ones; their "
        "numbers of experts replace those of --shape",
    )
    add("--steps", type=int, default=256, help="tokens of each stream")
    add("--arguments", type=json.loads, default={}, help="more arguments of the engine, as JSON")
    add("--json", type=output_file, required=True)
    args = parser.parse_args()
    if args.record is not None:
        record = args.record = RouteRecord.load(args.record).decoded
        if args.layers > len(record.layers):
            parser.error(f"--layers {args.layers}: the record has {len(record.layers)}")
        args.shape = args.shape._replace(
            experts=record.model.num_experts, top_k=record.routes.shape[2]
        )
    return args


def start(args: argparse.Namespace) -> Any:
    """The engine, of this process's environment."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(args, Path(folder))
        if args.engine == "vllm":
            from cache_vllm import Vllm

            return Vllm(args, Path(folder))
        from cache_sglang import Sglang

        return Sglang(args, Path(folder))


def rows(args: argparse.Namespace, bench: Bench) -> Iterator[dict[str, Any]]:
    for routes in ("local", "none") if args.record is None else (RECORDED,):
        for resident in args.resident:
            for streams in args.streams:
                yield bench.measure(routes, resident, FIXED, streams)
                yield bench.measure(routes, resident, MOVING, streams)
                for rate in args.rates if routes == "local" else ():
                    yield bench.measure(routes, resident, MOVING, streams, rate * 1e9)
    if args.record is None:
        yield from bench.shift(args.resident[len(args.resident) // 2])


def main() -> None:
    about = (__doc__ or "").split("\n", maxsplit=1)[0]
    args = arguments(about, resident=[0.12, 0.25, 0.4], engines=("vllm", "sglang"))
    bench = Bench(args, start(args))
    result: dict[str, Any] = about_engine(args.engine) | {
        "shape": args.shape._asdict(),
        "layers": args.layers,
        "hot_format": args.hot_format,
        "method": args.method,
        "expert_bytes": bench.expert_bytes,
        "rows": [],
    }
    for row in rows(args, bench):
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        save_result(args.json, result)
    sys.stdout.flush()
    os._exit(0)  # engines take long to end, and everything is saved


if __name__ == "__main__":
    main()
