"""Launches of Triton kernels with little work on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...runtime.streams import handle_of


class PreparedKernel:
    """A Triton kernel that is compiled for some kinds of arguments.

    Triton examines all arguments of each launch. Here the caller says what they are compiled for,
    so that later launches only pass them on. In Triton's interpreter, nothing is prepared.
    """

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

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
    ) -> Callable[..., None] | None:
        """Launches a kernel on the current stream.

        arguments: its first ones; constants: returns the others. kind: equal for launches for which
        Triton would compile the same code: dtypes, and which numbers and addresses are multiples of
        16.

        Returns a function that launches it with other arguments and ``stream``, a handle; None in
        the interpreter.
        """
        known = self._known.get(kind)
        if known is None:
            given = constants()
            kernel = function[grid](*arguments, **given, num_warps=warps)
            if kernel is None:
                return None
            rest = tuple(given[name] for name in function.arg_names[len(arguments) :])
            self._known[kind] = kernel, rest
            run = kernel[grid]
        else:
            kernel, rest = known
            run = kernel[grid]
            run(*arguments, *rest, stream=handle_of(device, None))
        return lambda *given, stream: run(*given, *rest, stream=stream)
