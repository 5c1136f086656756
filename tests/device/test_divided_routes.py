"""The kernel that divides routes, in Triton's interpreter, and its stand-in of tests."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from divided_routes import KINDS, Kind, check
from simulated_gpu import divide_routes

from kt_kernel.device.streaming.prepared import PreparedKernel


@pytest.mark.parametrize("kind", KINDS[:24], ids=str)
def test_every_route_is_in_one_place(kind: Kind) -> None:
    check(PreparedKernel(), kind, "cpu")


@pytest.mark.parametrize("kind", KINDS[:24], ids=str)
def test_the_same_without_triton(kind: Kind) -> None:
    """What stands in for the kernel in tests."""
    check(None, kind, "cpu", divide_routes)
