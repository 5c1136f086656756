"""Prepared launches pass on what Triton compiled a kernel for; stand-ins record them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_driver import Last
from kernels.compiling import build_fake_driver

from kt_kernel import _C
from kt_kernel.device import backend
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
    """Compiled: takes all parameters in order. The first constant is 1 in Triton's types, too."""

    function = 0x1234
    metadata = SimpleNamespace(num_warps=8, shared=512)
    src = SimpleNamespace(
        signature={"to": "*u8", "count": "i64", "FIRST": "constexpr", "SECOND": "constexpr"}
    )

    def __init__(self) -> None:
        self.launches: list[Any] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *given, stream: self.launches.append((grid, given, stream))


def launched(kernel: PreparedKernel, function: Any, kind: str, grid: int, *given: Any) -> Any:
    def constants() -> dict[str, str]:
        return {"SECOND": f"second {kind}", "FIRST": f"first {kind}"}

    return kernel.launch(function, (grid, 1, 1), given, constants, kind=kind, device=CPU)


def test_later_launches_are_those_of_the_same_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    current = 7
    monkeypatch.setattr(prepared, "handle_of", lambda device, stream: current)
    function, kernel = Function(), PreparedKernel()
    launched(kernel, function, "a", 2, "x", 1)
    launched(kernel, function, "b", 3, "y", 2)
    launched(kernel, function, "a", 4, "z", 3)
    current = 8  # another stream
    launched(kernel, function, "b", 5, "u", 4)
    of_a, of_b = function.compiled
    assert of_a.launches == [
        ((2, 1, 1), ("x", 1, "first a", "second a"), None),
        ((4, 1, 1), ("z", 3, "first a", "second a"), 7),
    ]
    assert of_b.launches == [
        ((3, 1, 1), ("y", 2, "first b", "second b"), None),
        ((5, 1, 1), ("u", 4, "first b", "second b"), 8),
    ]


@pytest.mark.parametrize("type_of_count", ["i64", "i32", "constexpr"])
def test_launches_of_the_compiled_core(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, type_of_count: str
) -> None:
    """With addresses, numbers as Triton typed them, and without what it made a constant."""
    driver = build_fake_driver(tmp_path)
    state = ctypes.CDLL(driver)
    core = SimpleNamespace(KernelLaunch=partial(_C.KernelLaunch, library=driver))
    monkeypatch.setattr(backend, "native", lambda: core)
    monkeypatch.setattr(prepared, "handle_of", lambda device, stream: 7)
    monkeypatch.setitem(Kernel.src.signature, "count", type_of_count)
    kernel, where, compiled = PreparedKernel(), [torch.zeros(4), torch.zeros(4)], Function()
    bound = [launched(kernel, compiled, "a", 2 + n, where[n], 1)() for n in range(2)]
    assert kernel._launches.keys() == {"a"}  # both launch the same function
    kept = [8] + {"i64": [8], "i32": [4], "constexpr": []}[type_of_count]
    sizes = (ctypes.c_int * 32).in_dll(state, "sizes")
    sizes[:5] = [*kept, 8, 8, 0, 0][:5]
    for n, launch in enumerate(bound):
        last = Last.in_dll(state, "last")
        launch.run(9)
        found = last.function, last.stream, last.shared, list(last.grid), list(last.block)
        assert found == (0x1234, 9, 512, [2 + n, 1, 1], [256, 1, 1])
        values = [where[n].data_ptr(), 1][: len(kept)]
        assert list(last.values)[: len(kept) + 3] == [*values, 0, 0, 0]
