"""Routines "gemv" and "gemm": a single kernel, with each thread on its own packed tiles."""

from __future__ import annotations

from typing import Any

import torch
from layer import team_of
from methods import Method, unit_of
from rounds import Line, visitor
from shapes import Shape

from kt_kernel import _C

STEP_SECONDS = 0.002  # about the time of one timed call


class KernelBench:
    """The GEMV or GEMM kernel of a method on the gate matrix [I, H] of a shape.

    A step is one tile of 32 rows of weights per thread, with all rows of X. The tiles of all
    threads take `working_set` bytes together and are visited in turn.
    """

    def __init__(
        self,
        shape: Shape,
        method: Method,
        table: str,
        gemm: bool,
        threads: int | None,
        working_set: int,
    ) -> None:
        self.method, self.table, self.gemm, self.columns = method, table, gemm, shape.hidden
        team, self.threads = team_of(threads)
        torch.manual_seed(0)
        source = method.make(shape.inter, shape.hidden)
        if method.dense:
            dense = source.data.float()
            addresses = (dense.data_ptr(), 0, 0, 1.0)
        else:
            addresses = source.addresses
        format, group, scale_type = method.form
        self._bench = _C.ProductBench(
            team,
            table=table,
            gemm=gemm,
            format=format,
            group_size=group,
            scale_type=scale_type,
            n=shape.inter,
            k=shape.hidden,
            w=addresses,
            bytes=working_set,
        )
        self._rows: Any = None  # the line whose X the core holds

    def line(self, rows: int, ceilings: dict[str, float]) -> Line:
        x = torch.randn(rows, self.columns).numpy()
        tiles = 1

        def step() -> float:
            return self._bench.run(tiles) / tiles

        measure = visitor(step)

        def visit(seconds: float) -> list[float]:
            nonlocal tiles
            if self._rows is not x:
                self._bench.set_rows(x)
                self._rows = x
            tiles = 1
            once = min(step() for _ in range(3))
            tiles = max(1, min(int(STEP_SECONDS / once), 4096))
            return measure(seconds)

        tile = self._bench.tile_bytes
        return Line(
            info={
                "package": "kt_moe",
                "method": self.method.name,
                "table": self.table,
                "tokens": rows,
                "threads": self.threads,
                "beside": "",
                "tokens_per_expert": rows,
                "packed_bytes_per_weight": tile / (32 * self.columns),
                "reuse_distance": self._bench.bytes,
            },
            bytes=tile * self.threads,
            operations=2.0 * 32 * self.columns * rows * self.threads,
            visit=visit,
            limits=self.threads,
            unit=unit_of(self.method, self.table, ceilings),
        )
