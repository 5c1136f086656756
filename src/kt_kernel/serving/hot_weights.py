"""The weights of hot experts that kt-moe gives to an engine's kernels: as 16-bit values, or as
4-bit codes with scales of groups. Independent of the engines.

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
from ..weights.expert_tensors import BIASES, MATRICES, Matrix
from ..weights.formats import INT4_GROUP, INT4_ZERO, LayerForm
from ..weights.methods import get_method
from ..weights.quantise import quantise_groups
from ..weights.quantised import QuantisedMatrix
from .options import KTOptions

_ZERO_8 = 0x88  # two zero points of 8


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
    """

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

    def check_complete(self) -> None:
        """ValueError if a matrix did not arrive."""
        missing = [
            f"slot {slot} ({which})"
            for slot in range(self.shape.slots)
            for which in MATRICES
            if (slot, which) not in self._arrived
        ]
        if missing:
            raise ValueError(
                f"{self.place}: weights of hot experts did not arrive: {', '.join(missing[:8])}"
            )

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
        return self._w13.nbytes + self._w2.nbytes


class PackedHot(HotWeights):
    """4-bit codes with a scale per group, in the layout of the engines' Triton kernels for weights
    of 4 bits and 16-bit activations.

    Attributes:
        w13, w2: uint8 [S, 2I, H/2] and [S, H, I/2], the even column of two in the low half.
        s13, s2: scales [S, 2I, H/g] and [S, H, I/g], in the activations' dtype.
        z13, z2: uint8 [S, I, H/g] and [S, H/2, I/g], zero points of two rows in a byte, the even
            row in the low half; None if all are 8.
        group: g.

    Raises ValueError if the sizes are not multiples of the group size.
    """

    def __init__(
        self,
        place: str,
        shape: HotShape,
        group: int,
        zero_points: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(place, shape)
        if shape.inter % (shape.ranks * group) or shape.hidden % group:
            raise ValueError(
                f"{place}: --kt-hot-format packed: hidden size {shape.hidden} and intermediate "
                f"size {shape.inter} on {shape.ranks} ranks are not multiples of the group size "
                f"{group}; accepted: bf16"
            )
        slots, hidden, inter = shape.slots, shape.hidden, shape.size

        def new(dtype: torch.dtype, *size: int) -> torch.Tensor:
            return torch.zeros(slots, *size, dtype=dtype, device=device)

        self.group = group
        self.w13 = new(torch.uint8, 2 * inter, hidden // 2)
        self.w2 = new(torch.uint8, hidden, inter // 2)
        self.s13 = new(dtype, 2 * inter, hidden // group)
        self.s2 = new(dtype, hidden, inter // group)
        self.z13 = self.z2 = None
        if zero_points:
            self.z13 = new(torch.uint8, inter, hidden // group).fill_(_ZERO_8)
            self.z2 = new(torch.uint8, hidden // 2, inter // group).fill_(_ZERO_8)

    def _put(self, place: str, slot: int, which: str, matrix: Matrix) -> None:
        if isinstance(matrix, torch.Tensor):
            # Quantised on the device, where it takes least time.
            matrix = quantise_groups(matrix.to(self.w13.device), self.group, self.s13.dtype, place)
        _check_packable(place, matrix, self.group, self.z13 is not None)
        assert isinstance(matrix, QuantisedMatrix) and matrix.scale is not None
        scale = matrix.scale.to(self.s13.dtype)
        if not bool(scale.isfinite().all()):
            raise ValueError(f"{place}: a scale is too large for {self.title}; accepted: bf16")
        part = self.shape.part
        if which == "down":
            self.w2[slot].copy_(matrix.codes[:, part.start // 2 : part.stop // 2])
            of_part = slice(part.start // self.group, part.stop // self.group)
            self.s2[slot].copy_(scale[:, of_part])
            if self.z2 is not None and matrix.zero is not None:
                self.z2[slot].copy_(_row_pairs(matrix.zero[:, of_part]))
            return
        odd, size = which == "up", self.shape.size
        rows = slice(odd * size, (odd + 1) * size)
        self.w13[slot, rows].copy_(matrix.codes[part])
        self.s13[slot, rows].copy_(scale[part])
        if self.z13 is not None and matrix.zero is not None:
            self.z13[slot, rows.start // 2 : rows.stop // 2].copy_(_row_pairs(matrix.zero[part]))

    @property
    def title(self) -> str:
        return f"4 bits, {str(self.s13.dtype).removeprefix('torch.')} scales of {self.group}"

    @property
    def nbytes(self) -> int:
        parts = (self.w13, self.w2, self.s13, self.s2, self.z13, self.z2)
        return sum(part.nbytes for part in parts if part is not None)


def _row_pairs(zero: torch.Tensor) -> torch.Tensor:
    return zero[0::2] | zero[1::2] << 4


def _check_packable(place: str, matrix: Matrix, group: int, zero_points: bool) -> None:
    """ValueError for a matrix that 4-bit kernels cannot hold."""
    problem = ""
    if not isinstance(matrix, QuantisedMatrix) or not matrix.format.grouped:
        problem = "is not stored in 4 bits with scales of groups"
    elif matrix.order is not None:
        problem = "has its columns in an order of its own (act-order)"
    elif matrix.scale is not None and matrix.codes.shape[1] * 2 != matrix.scale.shape[1] * group:
        problem = f"has groups of another size than {group}"
    elif matrix.zero is not None and (not zero_points or int(matrix.zero.max()) > 15):
        problem = "has a zero point of 16"
    if problem:
        raise ValueError(
            f"{place} {problem}, which --kt-hot-format packed does not support; accepted: bf16"
        )


def packed_hot(
    options: KTOptions,
    layer_idx: int,
    placement: Placement,
    shape: HotShape,
    dtype: torch.dtype,
    device: torch.device,
) -> PackedHot:
    """Allocates a layer's hot experts in 4 bits, with the groups of the method or of the files.

    dtype: of activations. Raises ValueError if 4-bit kernels cannot hold what the files have.
    """
    place, method = f"layer {layer_idx}", get_method(options.method)
    group, zero_points = method.group_size, False
    if method.quantised:
        sizes = placement.num_experts, shape.hidden, shape.inter
        assert options.weight_path is not None  # the method keeps what files hold
        with open_checkpoint(options.weight_path).each_expert(layer_idx, *sizes, ()) as stream:
            form = stream.form
        group, zero_points = _groups_of(place, form)
    return PackedHot(place, shape, group, zero_points, dtype, device)


def _groups_of(place: str, form: LayerForm | None) -> tuple[int, bool]:
    """The group size of a layer's experts, and whether they have zero points."""
    formats = set() if form is None else {each.format for each in form}
    sizes = set() if form is None else {each.group_size for each in form}
    if len(sizes) != 1 or not formats <= {INT4_GROUP, INT4_ZERO}:
        raise ValueError(
            f"{place}: the experts are stored as {form or '16-bit weights'}; --kt-hot-format "
            "packed needs 4 bits with groups of one size; accepted: bf16"
        )
    return sizes.pop(), INT4_ZERO in formats


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
    keeps = isinstance(target, PackedHot) and get_method(options.method).quantised
    sizes = placement.num_experts, target.shape.hidden, target.shape.inter
    with open_checkpoint(options.weight_path).each_expert(
        layer_idx, *sizes, placement.hot_experts, None if keeps else "BF16"
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
