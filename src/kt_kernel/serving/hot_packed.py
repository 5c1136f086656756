"""Hot experts in 4 or 8 bits, as the engines' Triton kernels for 16-bit activations read them.

See ``hot_weights.py``.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from ..checkpoint import open_checkpoint
from ..moe.placement import Placement
from ..weights.expert_tensors import Matrix
from ..weights.formats import INT4_GROUP, INT4_ZERO, INT8_ROW, LayerForm
from ..weights.methods import get_method
from ..weights.quantise import quantise_groups, quantise_rows
from ..weights.quantised import QuantisedMatrix
from .hot_weights import HotShape, HotWeights
from .options import KTOptions

_ZERO_8 = 0x88  # two zero points of 8


class PackedHot(HotWeights):
    """Codes and scales of hot experts.

    Attributes:
        bits: of a code, 4 or 8.
        group: columns per scale; 0: all of a row.
        w13, w2: codes [S, 2I, H * bits / 8] and [S, H, I * bits / 8].
        s13, s2: scales; see the subclasses.
        z13, z2: zero points, or None.
    """

    bits: int
    group = 0
    w13: torch.Tensor
    w2: torch.Tensor
    s13: torch.Tensor
    s2: torch.Tensor
    z13: torch.Tensor | None = None
    z2: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        parts = (self.w13, self.w2, self.s13, self.s2, self.z13, self.z2)
        return sum(part.nbytes for part in parts if part is not None)

    def _put(self, place: str, slot: int, which: str, matrix: Matrix) -> None:
        if isinstance(matrix, torch.Tensor):
            # Quantised on the device, where it takes least time.
            matrix = self._quantised(place, matrix.to(self.w13.device))
        assert isinstance(matrix, QuantisedMatrix), place
        self._put_codes(place, slot, which, matrix)

    @abstractmethod
    def _quantised(self, place: str, weights: torch.Tensor) -> QuantisedMatrix: ...

    @abstractmethod
    def _put_codes(self, place: str, slot: int, which: str, matrix: QuantisedMatrix) -> None: ...

    def _rows(self, which: str) -> slice:
        """The rows of gate or up in w13."""
        odd, size = which == "up", self.shape.size
        return slice(odd * size, (odd + 1) * size)


class GroupedHot(PackedHot):
    """4-bit codes with a scale per group.

    Attributes:
        w13, w2: uint8, the even column of two in the low half of a byte.
        s13, s2: [S, 2I, H/g] and [S, H, I/g], in the activations' dtype.
        z13, z2: uint8 [S, I, H/g] and [S, H/2, I/g], zero points of two rows in a byte, the even
            row in the low half; None if all are 8.

    Raises ValueError if the sizes are not multiples of the group size.
    """

    bits = 4

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
        if zero_points:
            self.z13 = new(torch.uint8, inter, hidden // group).fill_(_ZERO_8)
            self.z2 = new(torch.uint8, hidden // 2, inter // group).fill_(_ZERO_8)

    def _quantised(self, place: str, weights: torch.Tensor) -> QuantisedMatrix:
        return quantise_groups(weights, self.group, self.s13.dtype, place)

    def _put_codes(self, place: str, slot: int, which: str, matrix: QuantisedMatrix) -> None:
        _check_groups(place, matrix, self.group, self.z13 is not None)
        assert matrix.scale is not None
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
        rows = self._rows(which)
        self.w13[slot, rows].copy_(matrix.codes[part])
        self.s13[slot, rows].copy_(scale[part])
        if self.z13 is not None and matrix.zero is not None:
            self.z13[slot, rows.start // 2 : rows.stop // 2].copy_(_row_pairs(matrix.zero[part]))

    @property
    def title(self) -> str:
        return f"4 bits, {str(self.s13.dtype).removeprefix('torch.')} scales of {self.group}"


class RowHot(PackedHot):
    """8-bit codes with a scale per row.

    Attributes:
        w13, w2: int8.
        s13, s2: float32 [S, 2I] and [S, H].
    """

    bits = 8

    def __init__(self, place: str, shape: HotShape, device: torch.device) -> None:
        super().__init__(place, shape)
        slots, hidden, inter = shape.slots, shape.hidden, shape.size
        self.w13 = torch.zeros(slots, 2 * inter, hidden, dtype=torch.int8, device=device)
        self.w2 = torch.zeros(slots, hidden, inter, dtype=torch.int8, device=device)
        self.s13 = torch.zeros(slots, 2 * inter, dtype=torch.float32, device=device)
        self.s2 = torch.zeros(slots, hidden, dtype=torch.float32, device=device)

    def _quantised(self, place: str, weights: torch.Tensor) -> QuantisedMatrix:
        return quantise_rows(weights, place)

    def _put_codes(self, place: str, slot: int, which: str, matrix: QuantisedMatrix) -> None:
        assert matrix.format == INT8_ROW and matrix.scale is not None, place
        part = self.shape.part
        if which == "down":
            self.w2[slot].copy_(matrix.codes[:, part])
            self.s2[slot].copy_(matrix.scale)
            return
        rows = self._rows(which)
        self.w13[slot, rows].copy_(matrix.codes[part])
        self.s13[slot, rows].copy_(matrix.scale[part])

    @property
    def title(self) -> str:
        return "8 bits, float32 scales of rows"


def _row_pairs(zero: torch.Tensor) -> torch.Tensor:
    return zero[0::2] | zero[1::2] << 4


def _check_groups(place: str, matrix: QuantisedMatrix, group: int, zero_points: bool) -> None:
    """ValueError for a matrix that the kernels cannot hold."""
    problem = ""
    if not matrix.format.grouped or matrix.scale is None:
        problem = "is not stored in 4 bits with scales of groups"
    elif matrix.order is not None:
        problem = "has its columns in an order of its own (act-order)"
    elif matrix.codes.shape[1] * 2 != matrix.scale.shape[1] * group:
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
    """Allocates a layer's hot experts: in 8 bits for methods of 8 bits, else in 4 bits with the
    groups of the method or of the files.

    dtype: of activations. Raises ValueError if the kernels cannot hold what the files have.
    """
    place, method = f"layer {layer_idx}", get_method(options.method)
    if method.format == INT8_ROW:
        rows = RowHot(place, shape, device)
        rows.reads_as = method.name
        return rows
    group, zero_points = method.group_size, False
    if method.quantised:
        sizes = placement.num_experts, shape.hidden, shape.inter
        assert options.weight_path is not None  # the method keeps what files hold
        with open_checkpoint(options.weight_path).each_expert(layer_idx, *sizes, ()) as stream:
            form = stream.form
        group, zero_points = _groups_of(place, form)
    grouped = GroupedHot(place, shape, group, zero_points, dtype, device)
    if method.quantised:
        grouped.reads_as = None
    return grouped


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
