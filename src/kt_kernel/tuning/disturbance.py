"""Whether something else used the CPUs while they were measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ..runtime.machine import CpuTimes, allowed_cpus, cpu_times, disturbance
from .apart import Apart

Result = TypeVar("Result")


class Disturbances:
    """found: what was measured, and what disturbed it."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def measure(
        self, apart: Apart, what: str, function: Callable[..., Result], *arguments: Any
    ) -> Result:
        """The result of a function that measures in another process."""
        result, doubt = apart(_watched, function, *arguments)
        if doubt is not None:
            self.found[what] = doubt
        return result

    @contextmanager
    def during(self, what: str, times: Callable[[], CpuTimes]) -> Iterator[None]:
        """Watches while a block runs. times: as `cpu_times`, with what else the block measures."""
        before = times()
        yield
        doubt = disturbance(before, times(), len(allowed_cpus()))
        if doubt is not None:
            self.found[what] = doubt


def _watched(function: Callable[..., Result], *arguments: Any) -> tuple[Result, str | None]:
    watch = Disturbances()
    with watch.during("", cpu_times):
        result = function(*arguments)
    return result, watch.found.get("")
