"""Reads unquantised experts (BF16, FP16, FP32) of one layer into ExpertTensors.

Shapes and dtypes of the whole layer are checked from the headers. Data is read only for the
requested experts, and stacks are transposed expert by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...weights.expert_tensors import BIASES, MATRICES, Matrix, matrix_shapes
from ...weights.formats import BF16, WeightForm
from ..header import TensorInfo
from ..quantization import Quantization
from .arrangement import halves, stacked_shapes
from .families import Stacked
from .layout import Layout, Parts, PerExpert, StackedExperts
from .matrix import MatrixFormat
from .parts import Read

DTYPES = ("BF16", "F16", "F32")


class Dense(MatrixFormat):
    """weight [N, K] of 16 or 32 bits, in layers that also have quantised matrices."""

    title = "16- or 32-bit weights"
    tensors = "`weight` [N, K]; may have `bias` [N]"
    method = "BF16"
    formats = (BF16,)
    stacked = True
    dense = True

    def __init__(self, dtype: str) -> None:
        super().__init__(WeightForm(BF16))
        self._dtype = dtype

    @classmethod
    def open(cls, parts: Parts, rows: int, columns: int, quantization: Quantization) -> Dense:
        return cls(parts["weight"].dtype)

    def check(self, parts: Parts, rows: int, columns: int) -> None:
        _check(parts["weight"], (rows, columns), self._dtype)

    def read(self, parts: Parts, rows: int, columns: int, read: Read) -> torch.Tensor:
        return read(parts["weight"], None)


def open_dense(
    layout: Layout, num_experts: int, hidden_size: int, intermediate_size: int, read: Read
) -> tuple[tuple[str, ...], Callable[[int], dict[str, Matrix]]]:
    """Checks all of `layout` against the sizes; reads nothing.

    Returns the fields of ExpertTensors that the layer has, and a function that reads them for one
    expert.

    Raises ValueError naming file and tensor for a wrong number of experts, shape or dtype.
    """
    sizes = num_experts, hidden_size, intermediate_size
    if isinstance(layout, PerExpert):
        _check_per_expert(layout, *sizes)
        return fields_of(layout), lambda expert: _read_per_expert(layout.experts[expert], read)
    arrangement = _check_stacked(layout, *sizes)
    fields: tuple[str, ...] = MATRICES if arrangement.gated else MATRICES[1:]
    if arrangement.gate_up_bias is not None:
        fields += BIASES
    return fields, lambda expert: _read_stacked(layout, arrangement, expert, read)


def _check(info: TensorInfo, shape: Sequence[int], dtype: str | None) -> None:
    if info.dtype not in DTYPES:
        raise ValueError(
            f"{info} has dtype {info.dtype} and no scales; expected {', '.join(DTYPES)}"
        )
    if dtype and info.dtype != dtype:
        raise ValueError(f"{info} has dtype {info.dtype}; expected {dtype} as in the first expert")
    if info.shape != tuple(shape):
        raise ValueError(f"{info} has shape {list(info.shape)}; expected {list(shape)}")


def _check_per_expert(layout: PerExpert, num_experts: int, hidden: int, inter: int) -> None:
    experts = layout.experts
    check_count(layout, num_experts)
    shapes = matrix_shapes(hidden, inter)
    dtype = experts[0]["up"]["weight"].dtype
    for expert in experts:
        for matrix, parts in expert.items():
            _check(parts["weight"], shapes[matrix], dtype)
            if "bias" in parts:
                _check(parts["bias"], shapes[matrix][:1], None)


def check_count(layout: PerExpert, num_experts: int) -> None:
    """Raises ValueError for another number of experts."""
    if len(layout.experts) != num_experts:
        last = next(iter(layout.experts[-1]["down"].values()))
        raise ValueError(
            f"{last} belongs to the last of {len(layout.experts)} experts in {layout.where!r};"
            f" num_experts is {num_experts}"
        )


def _check_stacked(layout: StackedExperts, num_experts: int, hidden: int, inter: int) -> Stacked:
    tensors = layout.tensors
    chosen = layout.candidates[0]
    weights = [f for f in tensors if not f.endswith("bias")]
    for candidate in layout.candidates:
        shapes = stacked_shapes(candidate, num_experts, hidden, inter)
        if all(tensors[f].shape == shapes[f] for f in weights):
            chosen = candidate
    shapes = stacked_shapes(chosen, num_experts, hidden, inter)
    for field, info in tensors.items():
        _check(info, shapes[field], None if field.endswith("bias") else tensors[weights[0]].dtype)
    return chosen


def _read_per_expert(expert: dict[str, Parts], read: Read) -> dict[str, Matrix]:
    matrices: dict[str, Matrix]
    matrices = {matrix: read(parts["weight"], None) for matrix, parts in expert.items()}
    return matrices | read_biases(expert, read)


def fields_of(layout: PerExpert) -> tuple[str, ...]:
    """The fields of ExpertTensors that a layer has."""
    first = layout.experts[0]
    matrices = tuple(matrix for matrix in MATRICES if matrix in first)
    return matrices + tuple(f"{matrix}_bias" for matrix in matrices if "bias" in first[matrix])


def read_biases(expert: dict[str, Parts], read: Read) -> dict[str, torch.Tensor]:
    """Reads the biases of an expert, if it has any, as float32."""
    return {
        f"{matrix}_bias": read(parts["bias"], None).float()
        for matrix, parts in expert.items()
        if "bias" in parts
    }


def _read_stacked(layout: StackedExperts, s: Stacked, expert: int, read: Read) -> dict[str, Matrix]:
    part = {field: read(info, expert) for field, info in layout.tensors.items()}
    matrices = [f for f in part if not f.endswith("bias")]
    if s.columns:
        part |= {f: part[f].T for f in matrices}
    if s.gate_up:
        part["gate"], part["up"] = halves(part.pop("gate_up"), s.interleaved)
    result: dict[str, Matrix] = {m: part[m].contiguous() for m in MATRICES if m in part}
    if s.gate_up_bias:
        gate, up = halves(part["gate_up_bias"], s.interleaved)
        result |= {"gate_bias": gate.float().contiguous(), "up_bias": up.float().contiguous()}
        result["down_bias"] = part["down_bias"].float()
    return result
