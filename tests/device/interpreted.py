"""Stands in for the CUDA backend: runs the same kernels in Triton's interpreter, on the CPU."""

from __future__ import annotations

import ctypes
import inspect
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch


def at(address: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    """A tensor over foreign memory, which must outlive it."""
    size = torch.empty(0, dtype=dtype).element_size() * count
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=dtype)


def wait_for(address: int, value: int) -> None:
    """Waits like a stream. Fails after some seconds, where a stream would wait for ever."""
    word = at(address, torch.int32, 1)
    end = time.monotonic() + 10
    while word.item() != value:
        assert time.monotonic() < end, f"the word at {address:#x} is {word.item()}, not {value}"
        time.sleep(1e-5)


class Launch:
    """Runs a kernel on addresses, like the compiled core's KernelLaunch."""

    def __init__(self, function: Any, arguments: Sequence[Any], constants: dict[str, Any]) -> None:
        self._function, self._arguments, self._constants = function, arguments, constants
        self._names = list(inspect.signature(function.fn).parameters)

    def run(self, programs: int, stream: int, *values: int) -> None:
        *values, zero, other = values
        assert (zero, other) == (0, 0) and len(values) == len(self._arguments)
        tokens = dict(zip(self._names, values, strict=False))["tokens"]
        c = self._constants
        counts = dict.fromkeys(("x", "pinned_x", "pinned_out", "out"), tokens * c["HIDDEN"])
        counts |= {"hot": tokens * c["HIDDEN"] if c.get("ADD") else 1}
        routes = tokens * c.get("TOP_K", 0)
        counts |= dict.fromkeys(("ids", "weights", "pinned_ids", "pinned_weights"), routes)
        split = c.get("SPLIT")
        counts |= dict.fromkeys(("hot_ids", "hot_weights"), routes if split else 1)
        counts |= {"padding": tokens if c.get("PADDED") else 1}
        counts |= {"slot_map": c.get("EXPERTS", 0) if split else 1, "cell": 2, "done": 2}
        counts |= {"ring": c.get("ENTRIES", 0)}
        given = []
        for name, value, dtype in zip(self._names, values, self._arguments, strict=False):
            if dtype == 0:
                given.append(value)
            else:
                assert value % 16 == 0 or name == "padding", name
                given.append(at(value, dtype, counts.get(name, 1)))
        self._function[(programs,)](*given, **self._constants)

    def bind(self, programs: int, *bound: int | None, wait_address: int = 0) -> Any:
        def run(stream: int, *given: int) -> None:
            if wait_address:
                wait_for(wait_address, 1)
            rest = iter(given)
            self.run(programs, stream, *(next(rest) if v is None else v for v in bound))
            assert not list(rest)

        return SimpleNamespace(run=run)


class Interpreter:
    """CudaBackend's interface on the CPU. `pinned` has what is currently pinned."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.pinned: set[int] = set()
        self.in_capture = False
        self.compiled = self.synchronized = 0

    def pin(self, buffer: Any) -> None:
        self.pinned.add(buffer.address)

    def unpin(self, buffer: Any) -> None:
        self.pinned.remove(buffer.address)

    def compile(self, function: Any, arguments: Any, warps: int, **constants: Any) -> Launch:
        self.compiled += 1
        return Launch(function, arguments, constants)

    def capturing(self, stream: int | None = None) -> bool:
        return self.in_capture

    def wait(self, address: int, value: int) -> None:
        wait_for(address, value)

    def idle(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.synchronized += 1
