"""Launches of Triton kernels with little work on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...runtime.streams import handle_of
from ..backend import NO_SCRATCH, kernel_launch


class PreparedKernel:
    """A Triton kernel that is compiled for some kinds of arguments.

    Triton examines all arguments of each launch. Here the caller says what they are compiled for,
    so that later launches only pass them on. In Triton's interpreter, nothing is prepared.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Any, tuple[Any, ...]]] = {}
        self._launches: dict[Any, Any] = {}  # the compiled core's

    def launch(
        self,
        function: Any,
        grid: tuple[int, int, int],
        arguments: Sequence[Any],
        constants: Callable[[], Mapping[str, Any]],
        *,
        kind: Any,
        device: torch.device,
        warps: int = 4,
    ) -> Callable[[], Any] | None:
        """Launches a kernel on the current stream.

        arguments: its first ones; constants: returns the others. kind: equal for launches for which
        Triton would compile the same code: dtypes, and which numbers and addresses are multiples of
        16.

        Returns a function that makes a BoundLaunch of the compiled core, which does the same again;
        None in the interpreter. The memory of the arguments must outlive it.
        """
        known = self._known.get(kind)
        if known is None:
            given = constants()
            kernel = function[grid](*arguments, **given, num_warps=warps)
            if kernel is None:
                return None
            rest = tuple(given[name] for name in function.arg_names[len(arguments) :])
            self._known[kind] = kernel, rest
        else:
            kernel, rest = known
            kernel[grid](*arguments, *rest, stream=handle_of(device, None))
        return lambda: self._bound(kind, kernel, grid, arguments)

    def _bound(self, kind: Any, kernel: Any, grid: tuple[int, int, int], given: Any) -> Any:
        # Triton drops the parameters that it compiled as constants: also numbers that are 1.
        types = zip(given, kernel.src.signature.values(), strict=False)
        kept = [(value, type_) for value, type_ in types if type_ != "constexpr"]
        launch = self._launches.get(kind)
        if launch is None:
            launch = self._launches[kind] = kernel_launch(kernel, [type_ for _, type_ in kept])
        values = [value if isinstance(value, int) else value.data_ptr() for value, _ in kept]
        return launch.bind(grid, *values, *NO_SCRATCH)
