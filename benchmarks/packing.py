"""Routine "pack": packs source weights in memory, with all threads."""

from __future__ import annotations

import time

from layer import load, make_layer, team_of
from methods import Method, expert_sources
from rounds import Line, visitor
from shapes import Shape

from kt_kernel import _C


class PackBench:
    """One layer whose experts are packed in turn, each from its own source."""

    def __init__(self, shape: Shape, method: Method, threads: int | None, experts: int) -> None:
        self._shape = shape._replace(experts=experts, top_k=1)
        self._method = method
        self._team, self.threads = team_of(threads)
        self._layer = make_layer(self._team, method, self._shape, _C.kernel_tables()[0])
        first = expert_sources(method, shape)
        self._sources = [[s.clone() for s in first] for _ in range(experts)]
        self._bytes = sum(s.bytes for s in first) + self._layer.packed_bytes / experts
        begin = time.perf_counter()
        for slot in range(experts):
            load(self._layer, slot, method, self._sources[slot])
        self._first_touch = (time.perf_counter() - begin) / experts
        self._next = 0

    def line(self, limits: int) -> Line:
        experts, weights = self._shape.experts, self._shape.weights
        packed = self._layer.packed_bytes / experts

        def step() -> float:
            slot, self._next = self._next, (self._next + 1) % experts
            begin = time.perf_counter()
            load(self._layer, slot, self._method, self._sources[slot])
            return time.perf_counter() - begin

        return Line(
            info={
                "package": "kt_moe",
                "method": self._method.name,
                "table": "",
                "tokens": 0,
                "threads": self.threads,
                "beside": "",
                "packed_bytes_per_weight": packed / weights,
                "source_bytes": self._bytes - packed,
                "packed_bytes": packed,
                "first_touch_us": self._first_touch * 1e6,
                "reuse_distance": round(self._bytes * experts),
            },
            bytes=self._bytes / 2,  # a copy reads and writes each of its bytes
            operations=0.0,
            visit=visitor(step),
            limits=limits,
            unit=None,
            memory="dram_copy",
        )


def experts_needed(shape: Shape, method: Method, cache: int) -> int:
    """Experts whose sources and packed weights are more than twice the last-level cache."""
    source_bits = 16 if method.dense else method.bits
    return 2 + int(2.1 * cache / (shape.weights * (source_bits + method.bits) / 8))
