"""SGLang plugin: finds the padding rows of a captured graph. Imported only inside SGLang.

SGLang pads a batch to the size of a captured graph, and routes the padding like tokens. Below its
runners, nothing distinguishes the two, but all runners fill their graphs' inputs with one function,
which gets both numbers. A hook on it writes a mask that the graphs read at each replay. While
graphs are captured, all batches are dummies with hundreds of thousands of rows in total. The masks
mark all of these rows as padding; otherwise the CPU would spend minutes on the start of a large
model.
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
    """The padding masks of one process, whose passes run one after the other.

    Only the mask for the last batch's number of rows may mark padding. A layer that gets only some
    of a graph's rows uses the mask for another number of rows, which must not mark any. A layer
    that gets all rows has them in the order of the batch; parallelism that changes the order is
    refused.
    """

    def __init__(self) -> None:
        self._masks: dict[int, torch.Tensor] = {}  # by rows: bool, True for padding
        self._padded: set[int] = set()  # numbers of rows whose masks have a True
        self._last: Any = (
            None  # the last (tokens, rows); while they are the same, nothing is launched
        )
        self._given = False  # whether layers get masks: batches are dummies now

    @contextmanager
    def dummies(self) -> Iterator[None]:
        """Inside, batches are the dummies of graph captures."""
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
        batches outside of graphs, which SGLang does not pad."""
        if not self._given:
            return None
        rows = x.shape[0]
        if not _in_graph(x):
            self._last = None
            if rows not in self._masks:
                with torch.inference_mode(
                    False
                ):  # otherwise it could not be written outside of inference mode
                    self._masks[rows] = torch.empty(rows, dtype=torch.bool, device=x.device)
            if rows not in self._padded:
                self._padded.add(rows)
                self._masks[rows].fill_(True)
        return self._masks.get(rows)

    def fill(self, tokens: int, rows: int) -> None:
        """Called for a batch of ``tokens`` in a graph of ``rows``, on the replaying stream."""
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
    if masks.used:  # only by kt-moe's layers, and only if the numbers have these names
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
    """Whether the hook on fill_from is in effect and gets the numbers that it needs."""
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
