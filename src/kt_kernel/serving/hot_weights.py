"""The weights of hot experts that kt-moe gives to an engine's kernels: as 16-bit values, or in 4 or
8 bits (``hot_packed.py``). Independent of the engines.

An engine's tensors hold the matrices of slot s in row s: gate and up in one tensor [S, 2I, H], and
down [S, H, I]. Under tensor parallelism, a rank has its part of I.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..checkpoint import open_checkpoint
from ..moe.placement import Placement
from ..runtime.text import lacking
from ..weights.expert_tensors import BIASES, MATRICES, Matrix
from .options import KTOptions


@dataclass(frozen=True)
class HotShape:
    """The hot experts of a layer, as a rank of tensor parallelism holds them.

    Attributes:
        slots: S.
        hidden: H.
        inter: the intermediate size of a whole expert.
        rank, ranks: which part of the intermediate size this rank has, and of how many.
    """

    slots: int
    hidden: int
    inter: int
    rank: int = 0
    ranks: int = 1

    @property
    def part(self) -> slice:
        """The rank's part of the intermediate size."""
        size = self.inter // self.ranks
        return slice(self.rank * size, (self.rank + 1) * size)

    @property
    def size(self) -> int:
        """I, of this rank."""
        return self.inter // self.ranks


class HotWeights(ABC):
    """The tensors of a layer's hot experts on the engine's device.

    place: of the layer, for messages.

    Attributes:
        reads_as: the method in whose form files are read; None: as they are stored.
        parts: what an expert consists of: `MATRICES`, and `BIASES` if the tensors have them.
    """

    reads_as: str | None = "BF16"
    parts: tuple[str, ...] = MATRICES

    def __init__(self, place: str, shape: HotShape) -> None:
        self.place, self.shape = place, shape
        self._arrived: set[tuple[int, str]] = set()

    def put(self, slot: int, which: str, matrix: Matrix) -> None:
        """Takes a whole matrix of an expert: "gate" or "up" [I, H], or "down" [H, I]. Raises
        ValueError for a second delivery, a wrong shape, or a form that these tensors cannot
        hold."""
        place = f"{self.place}, slot {slot}, {which}"
        if (slot, which) in self._arrived:
            raise ValueError(f"{place}: arrived twice")
        self._put(place, slot, which, matrix)
        self._arrived.add((slot, which))

    @abstractmethod
    def _put(self, place: str, slot: int, which: str, matrix: Matrix) -> None: ...

    def put_bias(self, slot: int, which: str, bias: torch.Tensor) -> None:
        """Takes a whole bias of an expert: one of `BIASES`. Raises ValueError if the tensors have
        no biases."""
        raise ValueError(f"{self.place}, slot {slot}: {which} is not supported here")

    def check_complete(self, placement: Placement) -> None:
        """ValueError if a matrix or a bias of a hot expert did not arrive."""
        missing = {
            expert: [
                which
                for which in self.parts
                if (placement.slots[expert], which) not in self._arrived
            ]
            for expert in placement.hot_experts
        }
        if problem := lacking(missing):
            raise ValueError(f"{self.place}: weights of hot experts did not arrive: {problem}")

    @property
    @abstractmethod
    def title(self) -> str:
        """What a weight is stored as."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes on the device."""

    def _own_part(self, which: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's rows of gate and up."""
        return tensor[self.shape.part] if which != "down" else tensor


class DenseHot(HotWeights):
    """16-bit (or 32-bit) weights in an engine's own tensors.

    w13 [S, 2P, H], w2 [S, H, P]: P is the rank's part of the intermediate size, or more if the
    engine pads it; the padding becomes zeros. b13 [S, 2P], b2 [S, H]: biases, if there are any.
    interleaved: rows of gate and up alternate. Raises ValueError for other shapes.
    """

    def __init__(
        self,
        place: str,
        shape: HotShape,
        w13: torch.Tensor,
        w2: torch.Tensor,
        *,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
        interleaved: bool = False,
    ) -> None:
        super().__init__(place, shape)
        padded = w2.shape[-1]
        expected = (shape.slots, 2 * padded, shape.hidden), (shape.slots, shape.hidden, padded)
        if (tuple(w13.shape), tuple(w2.shape)) != expected or padded < shape.size:
            raise ValueError(
                f"{place}: the engine holds hot experts as {list(w13.shape)} and {list(w2.shape)}; "
                f"supported: {list(expected[0])} and {list(expected[1])}"
            )
        self._w13, self._w2, self._b13, self._b2 = w13, w2, b13, b2
        self._interleaved = interleaved
        if b13 is not None:
            self.parts = MATRICES + BIASES
        if padded > shape.size:
            w13.zero_()
            w2.zero_()

    def _put(self, place: str, slot: int, which: str, matrix: Matrix) -> None:
        assert isinstance(matrix, torch.Tensor), place
        if which == "down":
            self._w2[slot, :, : self.shape.size].copy_(matrix[:, self.shape.part])
        else:
            self._half(self._w13[slot], which).copy_(self._own_part(which, matrix))

    def put_bias(self, slot: int, which: str, bias: torch.Tensor) -> None:
        if self._b13 is None or self._b2 is None:
            super().put_bias(slot, which, bias)
            return
        self._arrived.add((slot, which))
        if which == "down_bias":  # added once, by the first rank
            self._b2[slot].copy_(bias if self.shape.rank == 0 else torch.zeros_like(bias))
        else:
            self._half(self._b13[slot], which[: -len("_bias")]).copy_(bias[self.shape.part])

    def _half(self, both: torch.Tensor, which: str) -> torch.Tensor:
        """The rows of gate or of up, without padding."""
        size, odd = self.shape.size, which == "up"
        if self._interleaved:
            return both[odd : 2 * size : 2]
        start = odd * len(both) // 2
        return both[start : start + size]

    @property
    def title(self) -> str:
        return str(self._w13.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        parts = (self._w13, self._w2, self._b13, self._b2)
        return sum(part.nbytes for part in parts if part is not None)


def read_hot(
    options: KTOptions,
    layer_idx: int,
    placement: Placement,
    target: HotWeights,
    change: Callable[[int, str, torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Reads the hot experts of a layer from --kt-weight-path into the engine's tensors.

    change: makes another matrix of an expert's number, the name of a matrix, and its values.

    Raises what the readers raise, and ValueError if the files lack an expert.
    """
    assert options.weight_path is not None
    sizes = placement.num_experts, target.shape.hidden, target.shape.inter
    with open_checkpoint(options.weight_path).each_expert(
        layer_idx, *sizes, placement.hot_experts, target.reads_as
    ) as stream:
        for expert, fields in stream:
            slot = placement.slots[expert]
            for which, tensor in fields.items():
                if which in BIASES:
                    assert isinstance(tensor, torch.Tensor)
                    target.put_bias(slot, which, tensor)
                else:
                    if change is not None and isinstance(tensor, torch.Tensor):
                        tensor = change(expert, which, tensor)
                    target.put(slot, which, tensor)
