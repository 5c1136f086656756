"""The kernel that divides routes, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from grid import grid

pytest.importorskip("triton")

from divided_routes import check

from kt_kernel.device.streaming.prepared import PreparedKernel


@grid(
    tokens=[0, 1, 100],
    ids_dtype=[torch.int32, torch.int64, torch.uint8],
    padding_dtype=[None, torch.bool, torch.int64],
    cold_slot=[-1, 0],
    live=[False, True],
    room=[2, 8],
)
def test_every_route_is_in_one_place(
    tokens: int,
    ids_dtype: torch.dtype,
    padding_dtype: torch.dtype | None,
    cold_slot: int,
    live: bool,
    room: int,
) -> None:
    check(PreparedKernel(), tokens, ids_dtype, padding_dtype, cold_slot, live, room, "cpu")
