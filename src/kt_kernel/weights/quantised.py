"""Quantised weight matrices: their tensors, and checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.tensors import DTYPES, need_dense, need_tensor, on_cpu
from .formats import (
    FP8_BLOCK,
    INT8_ROW,
    NVFP4,
    SCALE_TYPE_NAMES,
    WeightForm,
    WeightFormat,
    all_formats,
)

#: Types of group scales and their numbers.
SCALE_TYPES = {getattr(torch, name): i for i, name in enumerate(SCALE_TYPE_NAMES)}


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """One quantised weight matrix W [N, K], in row-major tensors.

    format: one of `kt_kernel.weights.formats`.

    ========================  ======================  ==========================================
    format                    codes                   scale
    ========================  ======================  ==========================================
    INT8_ROW                  int8 [N, K]             float32 [N]
    INT4_ROW                  uint8 [N, K/2]          float32 [N]
    INT4_GROUP, INT4_ZERO     uint8 [N, K/2]          float16, bfloat16 or float32 [N, K/g]
    FP8_BLOCK                 float8_e4m3fn [N, K]    float32 [ceil(N/128), ceil(K/128)]
    FP8_ROW                   float8_e4m3fn [N, K]    float32 [N]
    MXFP8                     float8_e4m3fn [N, K]    float8_e8m0fnu [N, K/32]
    MXFP4                     uint8 [N, K/2]          float8_e8m0fnu [N, K/32]
    NVFP4                     uint8 [N, K/2]          float8_e4m3fn [N, K/16]
    Q4_1 .. IQ4_XS (ggml)     uint8 [N, K/c*b]        None
    ========================  ======================  ==========================================

    Two codes share a byte: column 2j is the low half of byte j. A float8 tensor may also be given
    as uint8. W = code * scale, where an INT4 code stands for code - 8, or code - zero with
    INT4_ZERO: ``zero`` is uint8 [N, K/g] of 0 to 16. NVFP4 also multiplies with ``global_scale``.
    Group sizes g are multiples of 32 that divide K. e2m1 and ue8m0 are those of the OCP
    Microscaling Formats specification 1.0. Codes of ggml's formats are its unchanged blocks of c
    columns and b bytes (``block_columns`` and ``file_bytes``), which contain all scales.

    ``order``, int32 [K] or None: stored column j is column order[j] of W (act-order of GPTQ), so
    that stored groups are contiguous. INT4_GROUP and INT4_ZERO only.
    """

    format: WeightFormat
    codes: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None = None
    global_scale: float = 1.0
    order: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (self.codes, self.scale, self.zero, self.order)
        return sum(part.nbytes for part in parts if part is not None)


#: `CoreSource.address` of a gate that experts do not have.
NO_MATRIX = (0, 0, 0, 1.0)


class CoreSource:
    """A matrix in memory, as the compiled core reads it.

    rows: order of the matrix's rows, int32 [N]; not for scales per block of rows.

    Attributes:
        address: (data, scale, zero, global), valid while this object lives.
        dtype: number of a dense matrix's dtype; -1 for quantised ones.
        order: address of the column order, 0 if there is none.
    """

    def __init__(
        self, matrix: torch.Tensor | QuantisedMatrix, rows: torch.Tensor | None = None
    ) -> None:
        parts: tuple[torch.Tensor | None, ...]
        if isinstance(matrix, QuantisedMatrix):
            parts = matrix.codes, matrix.scale, matrix.zero
            factor, self.dtype = float(matrix.global_scale), -1
        else:
            parts = matrix, None, None
            factor, self.dtype = 1.0, DTYPES[matrix.dtype]
        self._parts = [None if part is None else in_order(on_cpu(part), rows) for part in parts]
        data, scale, zero = (0 if part is None else part.data_ptr() for part in self._parts)
        order = column_order(matrix)
        self._order = None if order is None else on_cpu(order)
        self.order = 0 if self._order is None else self._order.data_ptr()
        self.address = (data, scale, zero, factor)


def column_order(matrix: torch.Tensor | QuantisedMatrix) -> torch.Tensor | None:
    """The column order of a matrix, or None."""
    return matrix.order if isinstance(matrix, QuantisedMatrix) else None


def in_order(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """The tensor with its first dimension in the order of `rows`; the tensor itself for None."""
    return tensor if rows is None else tensor.index_select(0, rows.to("cpu"))


def check_matrix(
    place: str, matrix: Any, formats: tuple[WeightFormat, ...], rows: int, columns: int
) -> WeightForm:
    """Checks shapes and dtypes of a matrix [rows, columns] and returns its form. Values are checked
    during packing.

    Raises:
        TypeError, ValueError: not a matrix in one of ``formats``, or an invalid shape or dtype;
            names ``place`` and what is accepted.
    """
    if not isinstance(matrix, QuantisedMatrix):
        raise TypeError(f"{place} must be a QuantisedMatrix, got {type(matrix).__name__}")
    if matrix.format not in formats:
        names = " or ".join(format.title for format in formats)
        known = matrix.format in all_formats()
        given = matrix.format.title if known else f"format {matrix.format!r}"
        raise ValueError(f"{place} is {given}; accepted: {names}")
    format = matrix.format
    _check_order(place, matrix, columns)
    if format.ggml:
        return _check_blocks(place, matrix, rows, columns)
    if format == INT8_ROW:
        _check(f"{place}.codes", matrix.codes, (rows, columns), torch.int8)
    elif format.bits == 8:
        _check(f"{place}.codes", matrix.codes, (rows, columns), torch.float8_e4m3fn, torch.uint8)
    else:
        if columns % 2:
            raise ValueError(f"{place} has {columns} columns; accepted: an even number")
        _check(f"{place}.codes", matrix.codes, (rows, columns // 2), torch.uint8)
    if matrix.zero is not None and not format.zero_points:
        raise ValueError(f"{place}.zero must be None for {format.title}")
    if format.grouped:
        return _check_grouped(place, matrix, rows, columns)
    if format == FP8_BLOCK:
        _check(f"{place}.scale", matrix.scale, (-(-rows // 128), -(-columns // 128)), torch.float32)
    elif format.scale_kind == "row":
        _check(f"{place}.scale", matrix.scale, (rows,), torch.float32)
    else:
        shape = (rows, _divide(place, columns, format.scale_columns))
        dtype = torch.float8_e4m3fn if format == NVFP4 else torch.float8_e8m0fnu
        _check(f"{place}.scale", matrix.scale, shape, dtype, torch.uint8)
        if format == NVFP4 and not isinstance(matrix.global_scale, (int, float)):
            raise TypeError(f"{place}.global_scale must be a number, got {matrix.global_scale!r}")
    return WeightForm(format)


def _check(place: str, tensor: Any, shape: tuple[int, ...], *dtypes: torch.dtype) -> torch.Tensor:
    """The tensor itself, if it is one."""
    need_tensor(place, tensor)
    need_dense(place, tensor)
    if tensor.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{place} has dtype {tensor.dtype}; accepted: {names}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{place} must be {list(shape)}, got {list(tensor.shape)}")
    return tensor


def _check_order(place: str, matrix: QuantisedMatrix, columns: int) -> None:
    if matrix.order is None:
        return
    if not matrix.format.grouped:
        raise ValueError(f"{place}.order must be None for {matrix.format.title}")
    _check(f"{place}.order", matrix.order, (columns,), torch.int32)
    order = on_cpu(matrix.order)
    wrong = (order.sort().values != torch.arange(columns, device="cpu")).nonzero()
    if len(wrong):
        raise ValueError(
            f"{place}.order must have every column from 0 to {columns - 1} once; "
            f"{int(wrong[0])} is missing or repeated"
        )


def _divide(place: str, columns: int, unit: int) -> int:
    if columns % unit:
        raise ValueError(f"{place} has {columns} columns; accepted: multiples of {unit}")
    return columns // unit


def _check_blocks(place: str, matrix: QuantisedMatrix, rows: int, columns: int) -> WeightForm:
    blocks = _divide(place, columns, matrix.format.block_columns)
    _check(f"{place}.codes", matrix.codes, (rows, blocks * matrix.format.file_bytes), torch.uint8)
    for name in ("scale", "zero"):
        if getattr(matrix, name) is not None:
            raise ValueError(f"{place}.{name} must be None for {matrix.format.title}")
    return WeightForm(matrix.format)


def _check_grouped(place: str, matrix: QuantisedMatrix, rows: int, columns: int) -> WeightForm:
    name = f"{place}.scale"
    scale = _check(name, matrix.scale, tuple(getattr(matrix.scale, "shape", ())), *SCALE_TYPES)
    groups = scale.shape[1] if scale.dim() == 2 else 0
    group = columns // groups if groups and columns % groups == 0 else 0
    if scale.dim() != 2 or scale.shape[0] != rows or not group or group % 32:
        raise ValueError(
            f"{name} must be [{rows}, {columns} / group size], the group size a multiple of 32 "
            f"that divides {columns}; got {list(scale.shape)}"
        )
    if matrix.format.zero_points:
        _check(f"{place}.zero", matrix.zero, (rows, groups), torch.uint8)
    return WeightForm(matrix.format, group, SCALE_TYPES[scale.dtype])
