"""SGLang plugin: which rows of a captured graph are no tokens. Imported only inside SGLang.

For a captured graph SGLang pads a batch up to the graph's size, and routes the padding like tokens.
Below its runners nothing tells them apart, but all of them fill their graphs' inputs by one
function, which is given both numbers. A hook on it writes a mask that the graphs read at each
replay. While graphs are captured all batches are dummies, hundreds of thousands of rows: the masks
call them padding, or a large model's start would take the CPU minutes.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.model_executor.cuda_graph_buffer_registry import CudaGraphBufferRegistry

from .hooks import Hook, in_effect

_RUNNER = "sglang.srt.model_executor.runner"
_REGISTRY = "sglang.srt.model_executor.cuda_graph_buffer_registry:CudaGraphBufferRegistry"

_logger = logging.getLogger("sglang.kt")


class Masks:
    """Of one process, whose passes come one after the other.

    At most the mask of the last batch's rows says that there is padding: a layer that is given some
    of a graph's rows has the mask of another batch, which must not. A layer that is given all rows
    has them in the batch's order; parallelism that changes it is refused.
    """

    def __init__(self) -> None:
        self._masks: dict[int, torch.Tensor] = {}  # by rows: bool, True for padding
        self._padded: set[int] = set()  # whose masks have a True
        self._last: Any = None  # numbers filled in; while they stay, nothing is launched
        self._given = False  # to layers, whose batches are dummies now

    @contextmanager
    def dummies(self) -> Iterator[None]:
        """Within, batches are dummies, which graphs are captured with."""
        self._clear()
        self._given = _fills()
        try:
            yield
        finally:
            self._given = False

    @property
    def used(self) -> bool:
        return bool(self._masks)

    def of(self, x: torch.Tensor) -> torch.Tensor | None:
        """The mask [T] of a batch x [T, H] that is captured, or run before its capture; None for
        those that are in no graph, which SGLang does not pad."""
        if not self._given:
            return None
        rows = x.shape[0]
        if not _in_graph(x):
            self._last = None
            if rows not in self._masks:
                with torch.inference_mode(False):  # or it could not be written outside of it
                    self._masks[rows] = torch.empty(rows, dtype=torch.bool, device=x.device)
            if rows not in self._padded:
                self._padded.add(rows)
                self._masks[rows].fill_(True)
        return self._masks.get(rows)

    def fill(self, tokens: int, rows: int) -> None:
        """A batch of ``tokens`` goes to a graph of ``rows``; on the stream that replays it."""
        if self._last == (tokens, rows):
            return
        self._clear()
        self._last = tokens, rows
        if tokens < rows and rows in self._masks:
            self._masks[rows][tokens:] = True
            self._padded.add(rows)

    def _clear(self) -> None:
        for padded in self._padded:
            self._masks[padded].fill_(False)
        self._padded.clear()
        self._last = None


masks = Masks()


def _around_fill_from(original: Callable[..., Any], registry: Any, *args: Any, **given: Any) -> Any:
    result = original(registry, *args, **given)
    if masks.used:  # only by kt's layers, and where the numbers have these names
        masks.fill(given["raw_num_tokens"], given["padded_num_tokens"])
    return result


def _around_capture(original: Callable[..., Any], runner: Any, *args: Any, **given: Any) -> Any:
    with masks.dummies():
        return original(runner, *args, **given)


_FILL = Hook(f"{_REGISTRY}.fill_from", "AROUND", _around_fill_from)
HOOKS = (
    _FILL,
    Hook(
        f"{_RUNNER}.decode_cuda_graph_runner:DecodeCudaGraphRunner.capture",
        "AROUND",
        _around_capture,
    ),
    Hook(
        f"{_RUNNER}.prefill_cuda_graph_runner:PrefillCudaGraphRunner.capture",
        "AROUND",
        _around_capture,
    ),
)


def _fills() -> bool:
    """Whether the hook on fill_from is in effect and is given the numbers that it needs."""
    if not in_effect(_FILL):
        return False
    parameters = inspect.signature(CudaGraphBufferRegistry.fill_from).parameters
    for name in ("raw_num_tokens", "padded_num_tokens"):
        if name not in parameters or parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY:
            _logger.warning("kt: SGLang's fill_from has no keyword %s: %s", name, _FILL.without)
            return False
    return True


def _in_graph(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
