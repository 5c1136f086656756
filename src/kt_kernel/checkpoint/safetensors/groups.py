"""The groups of integer codes: the columns that share a scale, and the order of the columns."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ...weights.formats import WeightForm
from ...weights.quantised import SCALE_TYPES
from ..header import TensorInfo

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_USUAL = (128, 64, 32)
_UNIT = 32  # the kernels' groups are multiples of it


@dataclass(frozen=True)
class Groups:
    """How the columns of a matrix share scales.

    size: columns of a stored group; the last group may have fewer. count: number of stored groups.
    unit: columns per scale in memory. It divides `size` and the number of columns, so a partial
    last group needs no special case: scales are repeated.
    """

    columns: int
    size: int
    count: int
    unit: int

    def spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """[N, K / unit] of a stored tensor [N, count]; contiguous."""
        if self.unit == self.size:
            return tensor.contiguous()
        first = torch.arange(0, self.columns, self.unit, device="cpu")
        return tensor.index_select(1, first // self.size)

    def members(self) -> torch.Tensor:
        """The number of columns in each stored group."""
        sizes = torch.full((self.count,), self.size, dtype=torch.long, device="cpu")
        sizes[-1] = self.columns - self.size * (self.count - 1)
        return sizes


def groups_of(info: TensorInfo, columns: int, count: int, given: Iterable[int]) -> Groups:
    """The groups of a matrix with `columns` columns and `count` groups in the scales `info`.

    given: group sizes in config.json. They decide where the number of groups fits several sizes:
    two groups of 192 columns are 96 and 96, or 128 and 64. Sizes that do not fit are ignored, since
    config.json may speak of other matrices.

    Raises ValueError naming file and tensor if no size fits, or if no kernel supports it.
    """
    if count == 1:
        unit = next((usual for usual in _USUAL if columns % usual == 0), 0)
        if not unit:
            raise ValueError(
                f"{info}: one scale per row needs a multiple of {_UNIT} columns; got {columns}"
            )
        return Groups(columns, columns, 1, unit)
    sizes = [size for size in given if size > 0]
    if count and columns % count == 0:
        sizes.append(columns // count)
    partial = [size for size in range(_UNIT, columns, _UNIT) if -(-columns // size) == count]
    if len(partial) == 1:
        sizes += partial
    size = next((size for size in sizes if -(-columns // size) == count), 0)
    if not size:
        raise ValueError(
            f"{info} has {count} groups; expected a number that divides the {columns} columns, or a"
            f" group_size in config.json, a multiple of {_UNIT}, of which the last may have fewer"
        )
    unit = math.gcd(size, columns)
    if unit % _UNIT:
        raise ValueError(
            f"{info}: a group has {size} columns and a row {columns}; accepted: multiples of"
            f" {_UNIT}"
        )
    return Groups(columns, size, count, unit)


def scale_type(info: TensorInfo) -> int:
    """The number of the scales' type. Raises ValueError for other dtypes."""
    if info.dtype not in _DTYPES:
        raise ValueError(f"{info} has dtype {info.dtype}; expected {' or '.join(_DTYPES)}")
    return SCALE_TYPES[_DTYPES[info.dtype]]


def check_scale_type(info: TensorInfo, form: WeightForm) -> None:
    """Raises ValueError if the scales' type differs from that of the form."""
    if form.format.grouped and scale_type(info) != form.scale_type:
        raise ValueError(
            f"{info} has dtype {info.dtype}; expected that of the first expert's scales"
        )


def order_of_groups(info: TensorInfo, group: torch.Tensor, groups: Groups) -> torch.Tensor | None:
    """The columns sorted by group, int32 [K]; None if they are already sorted.

    group: [K], the group of each column (g_idx of GPTQ with desc_act, act-order).

    Raises ValueError naming file and tensor for an invalid group number, or if a group has another
    number of columns than `groups` say.
    """
    group = group.long()
    outside = (group < 0) | (group >= groups.count)
    if bool(outside.any()):
        where = int(outside.nonzero()[0])
        raise ValueError(
            f"{info}: column {where} is in group {int(group[where])}; accepted: 0 to"
            f" {groups.count - 1}"
        )
    members, expected = torch.bincount(group, minlength=groups.count), groups.members()
    other = members != expected
    if bool(other.any()):
        where = int(other.nonzero()[0])
        raise ValueError(
            f"{info}: {int(members[where])} columns are in group {where}; expected"
            f" {int(expected[where])} with {groups.count} groups of {groups.size} columns"
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
