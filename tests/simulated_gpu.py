"""A device for streaming on the CPU: copies are done at once, and host memory needs no access."""

from __future__ import annotations

from typing import Any

import torch


class ImmediateLane:
    """A CopyLane without a stream."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.in_capture = False
        self.copied = 0  # bytes

    def capturing(self) -> bool:
        return self.in_capture

    def wait(self) -> None:
        pass

    def event(self) -> Any:
        return None

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.copied += to.copy_(source).nbytes

    def order(self, event: Any) -> None:
        pass

    record_copies = delay_copies = record_compute = delay_compute = order


class Pins:
    """A CudaBackend's registration of host memory, at most ``limit`` times."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self.pinned: dict[int, int] = {}

    def pin(self, part: Any) -> None:
        if len(self.pinned) == self.limit:
            raise RuntimeError("cannot be pinned")
        self.pinned[part.address] = part.nbytes

    def unpin(self, part: Any) -> None:
        assert self.pinned.pop(part.address) == part.nbytes
