"""Copies experts from the CPU into slots of the engine's weights, in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.variant import native
from ..weights.expert_tensors import MATRICES
from .backend import cuda_context
from .slots import DenseSlots, SlotWeights
from .streaming.experts import PackedExperts


@dataclass(frozen=True)
class Upload:
    """An expert of a layer, and the slot of the same layer that it is copied to."""

    experts: PackedExperts
    weights: SlotWeights
    expert: int
    slot: int


class Uploads(ABC):
    """One upload after the other.

    Attributes:
        queue: the compiled core's UploadQueue; None if uploads are complete at once.
    """

    queue: Any = None

    @abstractmethod
    def start(self, uploads: Sequence[Upload]) -> int:
        """Starts uploads, in this order. Returns how many were started so far."""

    @abstractmethod
    def completed(self) -> int:
        """How many uploads are complete: the first ones."""

    @abstractmethod
    def wait(self) -> None:
        """Returns once all uploads are done."""


class CudaUploads(Uploads):
    """On a stream of their own, through memory for one packed expert.

    The compiled core starts any number of uploads at a time without Python's lock: to take the lock
    again for each of their parts would cost as much as the engine's thread does meanwhile.
    """

    def __init__(self, device: torch.device, layers: Sequence[PackedExperts]) -> None:
        size = max(layer.expert_bytes for layer in layers)
        with torch.inference_mode(False):
            self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)
        self._context = cuda_context(device)
        self.queue = native().UploadQueue(self._context, self._stream.cuda_stream)
        # What writes an expert from the memory to a slot. The keys keep its addresses valid.
        self._launches: dict[tuple[SlotWeights, int], list[Any]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._memory.nbytes

    def start(self, uploads: Sequence[Upload]) -> int:
        """The first upload to a slot goes through Triton, which compiles what it needs."""
        ready: list[Any] = []
        for upload in uploads:
            copies = self.copies(upload.experts, upload.expert)
            launches = self.launches(upload.weights, upload.slot)
            if launches is not None:
                ready.append((copies, launches))
                continue
            self.queue.start(ready)
            self._write(upload, copies)
            ready = [([], [])]  # which is complete once what was written is
        started: int = self.queue.start(ready)
        return started

    def copies(self, experts: PackedExperts, expert: int) -> list[tuple[int, int, int]]:
        """Copies of an expert to the device, as the compiled core's CudaContext takes them."""
        (run,) = experts.runs([expert])
        found, to = [], self._memory.data_ptr()
        for part in experts.parts:
            size = part.expert_bytes
            found.append((to, part.address + run.at * size, size))
            to += size
        return found

    def launches(self, weights: SlotWeights, slot: int) -> list[Any] | None:
        """The launches that write what was copied to a slot; None before the first upload to it."""
        return self._launches.get((weights, slot))

    def _write(self, upload: Upload, copies: list[tuple[int, int, int]]) -> None:
        self._context.copy(self._stream.cuda_stream, copies)
        with torch.cuda.stream(self._stream), torch.inference_mode():
            sizes = [part.expert_bytes for part in upload.experts.parts]
            staged = [part[None] for part in self._memory[: sum(sizes)].split(sizes)]
            launches = upload.weights.write(upload.experts, staged, upload.slot)
        if launches is not None:
            self._launches[upload.weights, upload.slot] = launches

    def completed(self) -> int:
        found: int = self.queue.completed()
        return found

    def wait(self) -> None:
        self.queue.wait()


class HostUploads(Uploads):
    """Into dense weights in host memory, at once. values: (layer's experts, expert, matrix) ->
    float32, the matrix's weights as the CPU's kernels use them."""

    def __init__(self, values: Callable[[PackedExperts, int, str], torch.Tensor]) -> None:
        self._values = values
        self._completed = 0

    def start(self, uploads: Sequence[Upload]) -> int:
        with torch.inference_mode():
            for upload in uploads:
                self._copy(upload)
                self._completed += 1
        return self._completed

    def _copy(self, upload: Upload) -> None:
        assert isinstance(upload.weights, DenseSlots)  # engines on the CPU have no others
        for matrix in MATRICES:
            values = self._values(upload.experts, upload.expert, matrix)
            upload.weights.matrix(upload.slot, matrix).copy_(values)

    def completed(self) -> int:
        return self._completed

    def wait(self) -> None:
        pass
