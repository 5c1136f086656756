"""The kernel that divides routes, in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from divided_routes import KINDS, Kind, check

from kt_kernel.device.streaming.prepared import PreparedKernel


@pytest.mark.parametrize("kind", KINDS[:24], ids=str)
def test_every_route_is_in_one_place(kind: Kind) -> None:
    check(PreparedKernel(), kind, "cpu")
