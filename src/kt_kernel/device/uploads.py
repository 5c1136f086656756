"""Copies experts from the CPU into slots of the engine's weights, in order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from ..weights.expert_tensors import MATRICES
from .slots import DenseSlots, SlotWeights
from .streaming.experts import PackedExperts


class Uploads(ABC):
    """One upload after the other."""

    @abstractmethod
    def start(
        self, experts: PackedExperts, weights: SlotWeights, expert: int, slot: int
    ) -> Callable[[], bool]:
        """Starts copying an expert of a layer to a slot of the same layer. Returns a function that
        tells whether the weights are complete."""

    @abstractmethod
    def wait(self) -> None:
        """Returns once all uploads are done."""


class CudaUploads(Uploads):
    """On a stream of their own, through memory for one packed expert."""

    def __init__(self, device: torch.device, layers: Sequence[PackedExperts]) -> None:
        size = max(layer.expert_bytes for layer in layers)
        with torch.inference_mode(False):
            self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)
        # Of each layer, where its experts' parts go on the device, and where they come from. Slices
        # are kept: each operation on tensors lets the engine's thread run first.
        self._staged: dict[int, list[torch.Tensor]] = {}
        self._sources: dict[tuple[int, int], list[torch.Tensor]] = {}  # by layer and expert

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._memory.nbytes

    def start(
        self, experts: PackedExperts, weights: SlotWeights, expert: int, slot: int
    ) -> Callable[[], bool]:
        event = torch.cuda.Event()
        staged = self._staged.get(id(experts))
        if staged is None:
            staged = self._staged[id(experts)] = self._stage(experts)
        sources = self._sources.get((id(experts), expert))
        if sources is None:
            (run,) = experts.runs([expert])
            sources = [part.memory[run.at : run.at + 1] for part in experts.parts]
            self._sources[id(experts), expert] = sources
        with torch.cuda.stream(self._stream), torch.inference_mode():
            for source, there in zip(sources, staged, strict=True):
                there.copy_(source, non_blocking=True)
            weights.write(experts, staged, slot, self._stream)
            event.record(self._stream)
        return event.query

    def _stage(self, experts: PackedExperts) -> list[torch.Tensor]:
        """For each part of a layer, memory on the device: uint8 [1, its bytes]."""
        found, begin = [], 0
        for part in experts.parts:
            end = begin + part.expert_bytes
            found.append(self._memory[begin:end].view(1, -1))
            begin = end
        return found

    def wait(self) -> None:
        self._stream.synchronize()


class HostUploads(Uploads):
    """Into dense weights in host memory, at once. values: (layer's experts, expert, matrix) ->
    float32, the matrix's weights as the CPU's kernels use them."""

    def __init__(self, values: Callable[[PackedExperts, int, str], torch.Tensor]) -> None:
        self._values = values

    def start(
        self, experts: PackedExperts, weights: SlotWeights, expert: int, slot: int
    ) -> Callable[[], bool]:
        assert isinstance(weights, DenseSlots)  # engines on the CPU have no packed ones
        with torch.inference_mode():
            for matrix in MATRICES:
                weights.matrix(slot, matrix).copy_(self._values(experts, expert, matrix))
        return lambda: True

    def wait(self) -> None:
        pass
