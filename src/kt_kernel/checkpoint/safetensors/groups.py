"""The groups of INT4 experts: their size, derived from the scales, and the order of the columns."""

from __future__ import annotations

import torch

from ...weights.formats import WeightForm, WeightFormat
from ...weights.quantised import SCALE_TYPES
from ..header import TensorInfo
from .layout import Parts
from .matrix import Shapes, two_dimensions

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_USUAL = (128, 64, 32)


def scale_type(info: TensorInfo) -> int:
    """The number of the scales' type. Raises ValueError for other dtypes."""
    if info.dtype not in _DTYPES:
        raise ValueError(f"{info} has dtype {info.dtype}; expected {' or '.join(_DTYPES)}")
    return SCALE_TYPES[_DTYPES[info.dtype]]


def check_scale_type(info: TensorInfo, form: WeightForm) -> None:
    """Raises ValueError if the scales' type differs from the layer's."""
    if scale_type(info) != form.scale_type:
        raise ValueError(
            f"{info} has dtype {info.dtype}; expected that of the first expert's scales"
        )


def grouped_form(
    format: WeightFormat, first: dict[str, Parts], scales: str, axis: int, shapes: Shapes
) -> WeightForm:
    """The form of a layer whose first expert has its scales in the tensors named `scales`, with the
    groups along `axis`. Raises ValueError for invalid groups."""
    tensors = {name: parts[scales] for name, parts in first.items()}
    groups = {name: two_dimensions(info)[axis] for name, info in tensors.items()}
    return WeightForm(format, _layer_group(groups, tensors, shapes), scale_type(tensors["gate"]))


def _layer_group(groups: dict[str, int], scales: dict[str, TensorInfo], shapes: Shapes) -> int:
    """Columns per scale, the same for gate, up and down. groups: the number of groups along K.

    If all three have one group per row, its size may differ between gate and down; the scales are
    then repeated for groups of a usual size. Raises ValueError if there is no common size, or if no
    kernel supports it.
    """
    columns = {name: shape[1] for name, shape in shapes.items()}
    for name, count in groups.items():
        if count < 1 or columns[name] % count:
            raise ValueError(
                f"{scales[name]} has {count} groups; expected a number that divides the"
                f" {columns[name]} columns"
            )
    if all(count == 1 for count in groups.values()):
        usual = [g for g in _USUAL if all(k % g == 0 for k in columns.values())]
        if not usual:
            raise ValueError(
                f"{scales['down']}: one scale per row needs sizes that are multiples of 32;"
                f" gate has {columns['gate']} columns and down {columns['down']}"
            )
        return usual[0]
    sizes = {name: columns[name] // count for name, count in groups.items()}
    size = sizes["gate"]
    for name, other in sizes.items():
        if other != size:
            raise ValueError(
                f"{scales[name]}: a group has {other} columns; expected {size} as in gate"
            )
    if size % 32:
        raise ValueError(f"{scales['gate']}: a group has {size} columns; accepted: multiples of 32")
    return size


def in_groups(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """[N, groups] with `count` groups, contiguous. A single group is repeated."""
    return (tensor.expand(-1, count) if tensor.shape[1] == 1 else tensor).contiguous()


def order_of_groups(
    info: TensorInfo, group: torch.Tensor, columns: int, groups: int
) -> torch.Tensor | None:
    """The columns sorted by group, int32 [K]; None if they are already sorted.

    group: [K], the group of each column (g_idx of GPTQ with desc_act, act-order).

    Raises ValueError naming file and tensor for an invalid group number, or if groups differ in
    size.
    """
    group = group.long()
    outside = (group < 0) | (group >= groups)
    if bool(outside.any()):
        where = int(outside.nonzero()[0])
        raise ValueError(
            f"{info}: column {where} is in group {int(group[where])}; accepted: 0 to {groups - 1}"
        )
    size = columns // groups
    members = torch.bincount(group, minlength=groups)
    other = members != size
    if bool(other.any()):
        where = int(other.nonzero()[0])
        raise ValueError(
            f"{info}: {int(members[where])} columns are in group {where}; expected {size} in each"
            f" of {groups} groups"
        )
    if bool((group[1:] >= group[:-1]).all()):
        return None
    return group.argsort(stable=True).int()


def nibbles_in_order(packed: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Reorders codes, two per byte [N, K/2], so that column order[j] comes to place j."""
    if order is None:
        return packed
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)[:, order.long()]
    return codes[:, 0::2] | codes[:, 1::2] << 4
