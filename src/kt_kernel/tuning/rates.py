"""What is measured on a machine, and curves through measured points."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

BATCH = 8192  # tokens of an engine's largest batch on a GPU of 80 to 141 GB, see `batches`
Points = tuple[tuple[float, float], ...]  # (size, seconds), by increasing size


def between(points: Sequence[tuple[float, float]], size: float) -> float:
    """Seconds for a size: linear between the points, from (0, 0) to the first one, and beyond the
    last one as between the last two."""
    at = bisect_left(points, size, key=lambda point: point[0])
    if at == 0 or len(points) == 1:
        return points[0][1] * size / points[0][0]
    (low, before), (high, after) = points[min(at, len(points) - 1) - 1 :][:2]
    return before + (after - before) * (size - low) / (high - low)


def at_least(points: Sequence[tuple[float, float]], size: float) -> float:
    """The same, but a size below the first point takes as long as that one."""
    return between(points, max(size, points[0][0]))


def rising(points: Sequence[tuple[float, float]]) -> Points:
    """The points without the noise by which a larger size takes less time."""
    found: list[tuple[float, float]] = []
    for size, seconds in points:
        found.append((size, max(seconds, found[-1][1]) if found else seconds))
    return tuple(found)


@dataclass(frozen=True)
class CpuRates:
    """How fast one number of threads computes experts in one method.

    Attributes:
        method: name of the method.
        threads: in total; None: kt-moe's own choice.
        expert_bytes: of a packed expert.
        experts: seconds of a pass in which so many experts have one row each.
        rows: seconds per expert of a pass in which each expert has so many rows, by numbers that
            begin with 1.
        chunk: tokens of a pass; more are computed one pass after the other.
        token: seconds of each token of a batch, whatever its routes.
    """

    method: str
    threads: int | None
    expert_bytes: float
    experts: Points
    rows: Points
    chunk: int = 1024
    token: float = 0.0

    def seconds(self, experts: float, routes: float) -> float:
        """Of a pass in which so many experts have so many routes together."""
        if experts <= 0 or routes <= 0:
            return 0.0
        rows = max(1.0, routes / experts)
        return between(self.experts, experts) * between(self.rows, rows) / self.rows[0][1]


@dataclass(frozen=True)
class GpuRates:
    """What a GPU does beside the CPU.

    Attributes:
        name: of the GPU.
        total: bytes of its memory.
        rest: seconds of a layer without its routed experts, in a CUDA graph, by tokens.
        kernel: seconds that a small kernel takes in a CUDA graph.
        bandwidth: bytes per second of its memory.
        flops: floating-point operations per second of a large 16-bit product.
        bus: bytes per second of copies from pinned host memory, as large as an expert.
        head: seconds of the output matrix and of sampling, in a CUDA graph, by tokens.
    """

    name: str
    total: int
    rest: Points
    kernel: float
    bandwidth: float
    flops: float
    bus: float
    head: Points


@dataclass(frozen=True)
class HostRates:
    """What the CPU does of a model besides its routed experts, where there is no GPU.

    Attributes:
        bandwidth: bytes per second that all threads read from memory.
        flops: floating-point operations per second of a large 16-bit product of torch.
    """

    bandwidth: float
    flops: float


@dataclass(frozen=True)
class EngineRates:
    """What an engine adds.

    Attributes:
        engine: its name.
        step: seconds of the host for a decode step, by streams. The GPU works meanwhile, so a step
            takes the longer of both.
        launch: seconds of the host to launch a layer of a prompt.
        share: part of the GPU's `flops` that a prompt reaches.
        attention: the same of the scores and their products with values alone; then `share` is of
            everything else. None: it was not measured by itself, and `share` is of everything.
        measured: whether this engine was measured here. Otherwise these are the values of one
            machine, see `engine.USUAL`.
    """

    engine: str
    step: Points
    launch: float
    share: float
    measured: bool = False
    attention: float | None = None

    def host_step(self, streams: int) -> float:
        """Seconds of the host for a decode step."""
        return at_least(self.step, streams)
