"""Replaces the routers' choice in the layers of kt-moe by recorded routes, also in CUDA graphs."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from kt_kernel.routes.record import RouteRecord
from kt_kernel.serving.hybrid import HybridLayer

VARIABLE = "KT_BENCHMARK_ROUTES"  # names the record of `install_from_environment`


class RouteTable:
    """Routes of the next tokens, layer by layer; after the last one, they begin again.

    record: at first. rows: tokens that later records may have; None: as many as this one has. The
    layers of a model take those of the record in order; the record may have more.
    """

    def __init__(self, record: RouteRecord, rows: int | None = None) -> None:
        self._record, self._rows = record, rows or len(record.routes)
        self._at: torch.Tensor | None = None
        self._table: torch.Tensor | None = None
        self._layers: dict[int, int] = {}  # number in the model: in the record

    def install(self) -> None:
        """From now on, all layers of this process get these routes."""
        original = HybridLayer.submit

        def submit(
            layer: HybridLayer, x: torch.Tensor, ids: torch.Tensor, *rest: Any, **more: Any
        ) -> Any:
            return original(layer, x, self._next(layer, ids), *rest, **more)

        HybridLayer.submit = submit  # type: ignore[method-assign]

    def use(self, record: RouteRecord) -> None:
        """The next tokens have these routes. Nothing may be running."""
        self._record = record
        if self._table is None or self._at is None:
            return
        routes = torch.from_numpy(record.routes.astype(np.int64)).transpose(0, 1)
        rows = torch.arange(self._rows) % routes.shape[1]
        self._table.copy_(routes[:, rows])
        self._at.zero_()
        if self._table.is_cuda:
            torch.cuda.synchronize()

    def _next(self, layer: HybridLayer, ids: torch.Tensor) -> torch.Tensor:
        if self._table is None:  # the first batch, which no graph captures
            self._create(ids)
        assert self._table is not None and self._at is not None
        number = self._layers.setdefault(layer.layer_idx, len(self._layers))
        if number >= len(self._table):
            raise ValueError(f"the record has {len(self._table)} layers, and the model has more")
        if layer.num_experts < self._record.model.num_experts:
            raise ValueError(
                f"the record is of {self._record.model.num_experts} experts, and layer "
                f"{layer.layer_idx} has {layer.num_experts}"
            )
        rows = (self._at[number] + torch.arange(len(ids), device=ids.device)) % self._rows
        self._at[number].add_(len(ids))
        return self._table[number].index_select(0, rows).to(ids.dtype)

    def _create(self, ids: torch.Tensor) -> None:
        _, layers, per_token = self._record.routes.shape
        if ids.shape[1] != per_token:
            raise ValueError(
                f"the record has {per_token} experts per token, and the model {ids.shape[1]}"
            )
        with torch.inference_mode(False):
            self._at = torch.zeros(layers, 1, dtype=torch.int64, device=ids.device)
            self._table = torch.zeros(
                (layers, self._rows, per_token), dtype=torch.int64, device=ids.device
            )
        self.use(self._record)


def install_from_environment() -> None:
    """Uses the decoded tokens of the file that the environment names, if it names one. An engine
    may run its model in another process, which inherits the variable."""
    if path := os.environ.get(VARIABLE):
        RouteTable(RouteRecord.load(path).decoded).install()
