"""The six LoRA tensors of a layer: names, shapes, checks, and the forms in which they travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.tensors import need_dense, need_tensor
from ..weights.expert_tensors import MATRICES

#: Of each matrix A, which its input enters, then B: the order of the compiled core.
LORA_NAMES = tuple(f"{matrix}_lora_{side}" for matrix in MATRICES for side in "ab")

#: Of the dictionary that backward returns.
GRAD_NAMES = tuple(f"grad_{name}" for name in LORA_NAMES)

#: The dimension of I within one expert, of the tensors that have one.
_INTERMEDIATE_DIM = {
    "gate_lora_b": 0,
    "up_lora_b": 0,
    "down_lora_a": 1,
    "gate_proj": 0,
    "up_proj": 0,
    "down_proj": 1,
}


def lora_shapes(experts: int, rank: int, hidden: int, inter: int) -> dict[str, tuple[int, ...]]:
    """Shapes by `LORA_NAMES`: A [E, R, in], B [E, out, R]."""
    shapes: dict[str, tuple[int, ...]] = {}
    for matrix in MATRICES:
        columns, rows = (inter, hidden) if matrix == "down" else (hidden, inter)
        shapes[f"{matrix}_lora_a"] = (experts, rank, columns)
        shapes[f"{matrix}_lora_b"] = (experts, rows, rank)
    return shapes


def check_lora(place: str, name: str, tensor: Any, shape: tuple[int, ...]) -> None:
    """Raises TypeError or ValueError, naming the tensor, for anything that cannot be a LoRA tensor
    of that shape."""
    need_tensor(f"{place}: {name}", tensor)
    need_dense(f"{place}: {name}", tensor)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{place}: {name} must be {list(shape)}, got {list(tensor.shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"{place}: {name} has dtype {tensor.dtype}; accepted: float dtypes")


def need_float_dtype(name: str, dtype: Any) -> torch.dtype:
    """The dtype; TypeError or ValueError, naming the argument, for anything but a float dtype."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} must be a torch.dtype, got {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"{name}={dtype}; accepted: float dtypes")
    return dtype


class SlotOrder:
    """The order in which the compiled layer has the experts and their intermediate columns.

    Slot p holds logical expert mapping[p]. Where ``down_proj`` is stored with its columns in
    another order (act-order of GPTQ), the layer computes its intermediate values in that order, so
    the LoRA tensors and the gradients that have a dimension of I are reordered on their way.
    """

    def __init__(self, mapping: Sequence[int]) -> None:
        self.mapping = list(mapping)
        self._identity = self.mapping == list(range(len(self.mapping)))
        self._index = torch.tensor(self.mapping, dtype=torch.int64, device="cpu")
        self._columns: dict[int, torch.Tensor] = {}

    def set_columns(self, slot: int, order: torch.Tensor | None) -> None:
        """The order of a slot's intermediate columns, int [I]: stored column j is column order[j]
        of the model. None: the model's own."""
        if order is None:
            self._columns.pop(slot, None)
        else:
            self._columns[slot] = order.to("cpu", torch.int64)

    def to_slots(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A LoRA tensor as the layer reads it: float32, contiguous, on the CPU, by slot."""
        result = tensor.detach().to("cpu", torch.float32)
        if not self._identity:
            result = result.index_select(0, self._index)
        dim = _INTERMEDIATE_DIM.get(name)
        if dim is not None and self._columns:
            given, result = result, result.clone(memory_format=torch.contiguous_format)
            for slot, order in self._columns.items():
                torch.index_select(given[slot], dim, order, out=result[slot])
        return result.contiguous()

    def to_logical(self, name: str, by_slot: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The gradient of the tensor ``name``, of which the layer computed ``by_slot``. Gradients
        of slots with the same logical expert are summed."""
        dim = _INTERMEDIATE_DIM.get(name)
        if dim is not None and self._columns:
            given, by_slot = by_slot, by_slot.clone()
            for slot, order in self._columns.items():
                by_slot[slot].index_copy_(dim, order, given[slot])
        if not self._identity:
            summed = torch.zeros_like(by_slot)
            summed.index_add_(0, self._index, by_slot)
            by_slot = summed
        return by_slot.to(dtype)
