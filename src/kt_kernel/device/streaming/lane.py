"""The stream of copies to a GPU, and its order relative to the computations there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ..backend import cuda_context
from .experts import Run
from .timeline import Stamp


class CopyLane:
    """A CUDA stream of its own for copies to the device.

    "Compute" is the stream that is current in the calling thread. An event that was never recorded
    is not waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
        self._context = cuda_context(device)

    def capturing(self) -> bool:
        """Whether what is computed goes into a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def wait(self) -> None:
        """Returns once copies and computations are done."""
        torch.cuda.synchronize(self.device)

    def event(self) -> Any:
        """A new event."""
        return torch.cuda.Event()

    def copy(self, to: torch.Tensor, source: torch.Tensor, runs: Sequence[Run]) -> None:
        """Copies rows of registered host memory to the device, by one call of the compiled core.
        Both tensors are uint8 [rows, bytes of a row], contiguous."""
        row, begin, end = source.shape[1], source.data_ptr(), to.data_ptr()
        self._context.copy(
            self._stream.cuda_stream,
            [(end + run.to * row, begin + run.at * row, run.count * row) for run in runs],
        )

    def record_copies(self, event: Any) -> None:
        """The event occurs once all copies so far are done."""
        event.record(self._stream)

    def delay_copies(self, event: Any) -> None:
        """Later copies wait for the event."""
        self._stream.wait_event(event)

    def record_compute(self, event: Any) -> None:
        """The event occurs once what was computed so far is done."""
        event.record(torch.cuda.current_stream(self.device))

    def delay_compute(self, event: Any) -> None:
        """What is computed later waits for the event."""
        torch.cuda.current_stream(self.device).wait_event(event)

    def stamp_copies(self) -> Stamp:
        """The moment when all copies so far are done."""
        return _stamp(self._stream)

    def stamp_compute(self) -> Stamp:
        """The moment when what was computed so far is done."""
        return _stamp(torch.cuda.current_stream(self.device))


def _stamp(stream: Any) -> Stamp:
    event, launched = torch.cuda.Event(enable_timing=True), time.monotonic_ns()
    event.record(stream)
    return Stamp(event, launched)
