"""SGLang plugin: which rows of a captured graph are no tokens. Imported only inside SGLang.

For a captured graph SGLang pads a batch up to the graph's size, and routes the padding like tokens.
Below its runners nothing tells them apart, but all of them fill their graphs' inputs by one
function, which is given both numbers. A hook on it writes a mask that the graphs read at each
replay. While graphs are captured all batches are dummies, hundreds of thousands of rows: the masks
call them padding, or a large model's start would take the CPU minutes.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_RUNNER = "sglang.srt.model_executor.runner"
_REGISTRY = "sglang.srt.model_executor.cuda_graph_buffer_registry.CudaGraphBufferRegistry"
_PROBE = object()  # asks fill_from whether it is ours


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


def hooks() -> list[tuple[str, Callable, str]]:
    """As `layer.hooks`. Without the first there is no mask; without another one the CPU
    computes the dummies of its runner, and what pads its graphs."""
    return [
        (f"{_REGISTRY}.fill_from", _around_fill_from, "AROUND"),
        (f"{_RUNNER}.decode_cuda_graph_runner.DecodeCudaGraphRunner.capture",
         _around_capture, "AROUND"),
        (f"{_RUNNER}.prefill_cuda_graph_runner.PrefillCudaGraphRunner.capture",
         _around_capture, "AROUND"),
    ]  # fmt: skip


def _around_fill_from(original: Callable, registry: Any, *args: Any, **given: Any) -> Any:
    if registry is _PROBE:
        return _PROBE
    result = original(registry, *args, **given)
    if masks.used:  # only by kt's layers, and where the numbers have these names
        masks.fill(given["raw_num_tokens"], given["padded_num_tokens"])
    return result


def _around_capture(original: Callable, runner: Any, *args: Any, **given: Any) -> Any:
    with masks.dummies():
        return original(runner, *args, **given)


def _fills() -> bool:
    """Whether the hook on fill_from is in effect, since SGLang only logs it when one fails, and is
    told what it looks for."""
    from sglang.srt.model_executor.cuda_graph_buffer_registry import CudaGraphBufferRegistry

    fill_from = CudaGraphBufferRegistry.fill_from
    parameters = inspect.signature(fill_from).parameters
    if any(
        name not in parameters or parameters[name].kind is not inspect.Parameter.KEYWORD_ONLY
        for name in ("raw_num_tokens", "padded_num_tokens")
    ):
        return False
    try:
        return fill_from(_PROBE) is _PROBE
    except Exception:  # SGLang's own function cannot take the probe
        return False


def _in_graph(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
