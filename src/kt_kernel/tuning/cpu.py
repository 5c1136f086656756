"""Measures how fast the CPU computes a model's experts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..moe.activation import ExpertActivation
from ..moe.settings import MAX_CHUNK
from ..moe.tuning import WORTH_BYTES, layer_tuning, random_source
from ..runtime.machine import allowed_cpus, available_memory, last_level_cache
from ..runtime.pools import PoolPlan, get_team
from ..runtime.text import shown_size
from ..runtime.variant import kernel_kind, kernel_table, native
from ..weights.expert_tensors import matrix_shapes
from ..weights.formats import LayerForm
from ..weights.quantised import NO_MATRIX, CoreSource
from .rates import CpuRates, rising
from .shape import Shape

_ROWS = (1, 2, 4, 8, 16, 32, 64)  # of each expert
_CACHES = 4.4  # bytes of the measured experts, in sizes of the last-level cache
_MOST_EXPERTS = 1024
_MEMORY = 4  # at most this part of the free memory is taken
_ROUNDS = 5
_SECONDS = 0.1  # for the repetitions of one point
# What measured experts compute. Others than these take about as long.
_SWIGLU, _WITHOUT_GATE = ExpertActivation(), ExpertActivation("relu2", gated=False)


def measured_experts(shape: Shape, expert_bytes: float) -> int:
    """How many experts to measure with: more bytes than the caches hold, if the model has as many,
    so that passes read memory as they do while serving. At least those of two tokens.

    Raises:
        ValueError: these do not fit into memory.
    """
    of_model = shape.experts * len(shape.moe_layers)
    beyond_cache = int(_CACHES * last_level_cache() / expert_bytes) + 1
    free = available_memory()
    room = int(free / _MEMORY / expert_bytes)
    most = min(max(beyond_cache, shape.experts), of_model, room, _MOST_EXPERTS)
    least = min(2 * shape.top_k, shape.experts)
    # A matrix in float32, from which an expert is made, is there, too.
    needed = least * expert_bytes + 4 * shape.expert_weights
    if needed > free:
        raise ValueError(
            f"{shape.name}: measuring the CPU takes {shown_size(needed)} of memory for {least} "
            f"experts, and {shown_size(free, down=True)} are available"
        )
    return max(most, least)


@dataclass
class CpuBench:
    """Random experts of a model's shape in one method, computed by one team of threads.

    form: how the weights are packed. threads: as users give them, for the result.
    """

    shape: Shape
    method: str
    form: LayerForm
    plan: PoolPlan
    threads: int | None
    _next: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        shape, table = self.shape, kernel_table()
        bytes_of_weight = max(one.format.bits for one in self.form) / 8
        count = measured_experts(shape, shape.expert_weights * bytes_of_weight)
        # As many rows of an expert in a pass as in the model.
        self._chunk = max(shape.top_k, MAX_CHUNK * min(count, shape.experts) // shape.experts)
        tuned = shape.experts * shape.expert_weights // 2 >= WORTH_BYTES
        kind = kernel_kind()
        self._core = native().MoeLayer(
            get_team(self.plan),
            num_experts=count,
            top_k=shape.top_k,
            hidden_size=shape.hidden,
            intermediate_size=shape.inter,
            forms=[one.core for one in self.form],
            cpu_slots=[True] * count,
            max_tokens=self._chunk,
            table=table,
            kind=kind,
            **(_SWIGLU if shape.gated else _WITHOUT_GATE).core,
            **(layer_tuning(self.form, table) if tuned and not kind else {}),
        )
        sizes = matrix_shapes(shape.hidden, shape.inter)
        sources = [
            CoreSource(random_source(form, *size)) if shape.gated or name != "gate" else None
            for form, (name, size) in zip(self.form, sizes.items(), strict=True)
        ]
        for slot in range(count):
            self._core.load(
                slot,
                *(source.address if source else NO_MATRIX for source in sources),
                dtypes=[source.dtype if source else -1 for source in sources],
            )
        self._count = count
        most = max(self._chunk, -(-count // shape.top_k))
        self._x = torch.randn(most, shape.hidden).bfloat16()
        self._weights = torch.full((most, shape.top_k), 1 / shape.top_k)
        self._out = torch.empty_like(self._x)

    def rates(self) -> CpuRates:
        """Measures. The shortest of several times counts for batches, and the median for passes
        with few experts, which wait for memory."""
        shape, k = self.shape, self.shape.top_k
        active = min(self._count, shape.experts)
        sizes = sorted({*_doubling(active), k, active})
        sizes = [n for n in sizes if n <= active]
        first = [self._pass(n) for n in sizes]
        rows: list[tuple[float, float]] = [(1, first[-1] / active)]
        for each in _ROWS[1:]:
            tokens = each * active // k
            if tokens > self._chunk:
                break
            # More rows never take less time.
            rows.append((each, max(rows[-1][1], self._batch(tokens, active) / active)))
        at_most = self._chunk * k / active
        if at_most > 1.5 * rows[-1][0]:
            tokens = self._chunk
            rows.append((at_most, max(rows[-1][1], self._batch(tokens, active) / active)))
        # Neighbours on a shared machine take more or less of the memory's bandwidth from second to
        # second, so passes are timed before and after the batches.
        experts = [(n, (a + self._pass(n)) / 2) for n, a in zip(sizes, first, strict=True)]
        return CpuRates(
            self.method,
            self.threads,
            self._core.packed_bytes / self._count,
            rising(experts),
            tuple(rows),
            MAX_CHUNK,
            self._token(),
        )

    def _token(self) -> float:
        """Seconds of a token in a batch with a single route, less one token."""
        times = []
        for tokens in (1, self._chunk):
            ids = torch.full((tokens, self.shape.top_k), -1, dtype=torch.int64)
            ids[0, 0] = 0
            times.append(min(self._run(ids) for _ in self._repeat()))
        return max(times[1] - times[0], 0.0) / max(self._chunk - 1, 1)

    def _pass(self, experts: int) -> float:
        """Seconds of a pass over as many experts with one row each; each time, other ones."""
        k = self.shape.top_k
        tokens = -(-experts // k)
        times = []
        for _ in self._repeat():
            ids = torch.full((tokens * k,), -1, dtype=torch.int64)
            ids[:experts] = (torch.arange(experts) + self._next) % self._count
            self._next = (self._next + experts) % self._count
            times.append(self._run(ids.view(tokens, k)))
        return sorted(times)[len(times) // 2]

    def _batch(self, tokens: int, active: int) -> float:
        """Seconds of a batch whose routes are spread evenly over as many experts."""
        k = self.shape.top_k
        times = []
        for _ in self._repeat():
            ids = (torch.arange(tokens * k) % active + self._next) % self._count
            self._next = (self._next + active) % self._count
            times.append(self._run(ids.view(tokens, k)))
        return min(times)

    def _repeat(self) -> Iterator[None]:
        """At least twice; then until the time is up."""
        end = time.perf_counter() + _SECONDS
        for number in range(20 * _ROUNDS):
            if number >= 2 and time.perf_counter() > end:
                break
            yield

    def _run(self, ids: torch.Tensor) -> float:
        begin = time.perf_counter()
        self._core.submit(
            self._x.data_ptr(),
            0,
            len(ids),
            ids.data_ptr(),
            self._weights.data_ptr(),
            self._out.data_ptr(),
        ).wait()
        return time.perf_counter() - begin


def cpu_rates(
    shape: Shape, method: str, form: LayerForm, plan: PoolPlan, threads: int | None
) -> CpuRates:
    """See `CpuBench`."""
    return CpuBench(shape, method, form, plan, threads).rates()


def _doubling(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


def host_rates() -> tuple[float, float]:
    """(bytes per second that memory is read with, operations per second of torch's products)."""
    limit = max(len(allowed_cpus()), 1)
    bandwidth = max(rate for _, rate in native().probe_read_bandwidth(limit))
    a = torch.randn(512, 1024).bfloat16()
    b = torch.randn(1024, 1024).bfloat16()
    best = min(_timed(lambda: a @ b) for _ in range(4))
    return bandwidth, 2 * 512 * 1024 * 1024 / best


def _timed(call: Any) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
