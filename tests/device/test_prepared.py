"""Prepared launches pass on what Triton compiled a kernel for; a stand-in records them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kt_kernel.device.streaming import prepared
from kt_kernel.device.streaming.prepared import PreparedKernel

CPU = torch.device("cpu")


class Function:
    """A Triton function with two arguments and two constants, and what it compiled."""

    arg_names = ("to", "count", "FIRST", "SECOND")

    def __init__(self) -> None:
        self.compiled: list[Kernel] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Kernel]:
        def run(*given: Any, num_warps: int, **constants: Any) -> Kernel:
            kernel = Kernel()
            self.compiled.append(kernel)
            kernel.launches.append((grid, (*given, constants["FIRST"], constants["SECOND"]), None))
            return kernel

        return run


class Kernel:
    """Compiled: takes all parameters in order."""

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *given, stream: self.launches.append((grid, given, stream))


def test_later_launches_are_those_of_the_same_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    current = 7
    monkeypatch.setattr(prepared, "handle_of", lambda device, stream: current)
    function, kernel, asked = Function(), PreparedKernel(), []

    def launch(kind: str, grid: int, *given: Any) -> Any:
        def constants() -> dict[str, str]:
            asked.append(kind)
            return {"SECOND": f"second {kind}", "FIRST": f"first {kind}"}

        whole = grid, 1, 1
        return kernel.launch(function, whole, given, constants, kind=kind, device=CPU)

    again = launch("a", 2, "x", 1)
    launch("b", 3, "y", 2)
    launch("a", 4, "z", 3)
    current = 8  # another stream
    launch("b", 5, "u", 4)
    again("v", 5, stream=9)
    assert asked == ["a", "b"]
    of_a, of_b = function.compiled
    assert of_a.launches == [
        ((2, 1, 1), ("x", 1, "first a", "second a"), None),
        ((4, 1, 1), ("z", 3, "first a", "second a"), 7),
        ((2, 1, 1), ("v", 5, "first a", "second a"), 9),
    ]
    assert of_b.launches == [
        ((3, 1, 1), ("y", 2, "first b", "second b"), None),
        ((5, 1, 1), ("u", 4, "first b", "second b"), 8),
    ]
