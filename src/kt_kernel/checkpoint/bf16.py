"""Reads unquantised experts (BF16, FP16, FP32) of one layer into ExpertTensors.

Shapes and dtypes are checked for the whole layer from the headers; data is read for the experts
asked for only. Tensors stored as they are needed stay views of the mapped file; the others are
transposed into memory of their own, expert by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..experts import ExpertTensors
from .families import Stacked
from .header import TensorInfo
from .layout import BIASES, MATRICES, Layout, PerExpert, StackedExperts

DTYPES = ("BF16", "F16", "F32")

# Returns the tensor, or the part of it with the given first index.
Read = Callable[[TensorInfo, int | None], torch.Tensor]


def infer_sizes(layout: Layout) -> tuple[int, int, int]:
    """(num_experts, hidden_size, moe_intermediate_size) as the shapes have them."""
    if isinstance(layout, PerExpert):
        info = layout.experts[0]["down"]
        _check_rank(info, 2)
        return len(layout.experts), *info.shape
    gate_up, down = layout.tensors["gate_up"], layout.tensors["down"]
    _check_rank(gate_up, 3)
    _check_rank(down, 3)
    for candidate in layout.candidates:
        experts, hidden, inter = down.shape
        if candidate.columns:
            hidden, inter = inter, hidden
        if gate_up.shape == _stacked_shapes(candidate, experts, hidden, inter)["gate_up"]:
            return experts, hidden, inter
    raise ValueError(f"{gate_up} has shape {list(gate_up.shape)}, which does not go with {down}"
                     f" of shape {list(down.shape)}")  # fmt: skip


def layer_reader(
    layout: Layout, num_experts: int, hidden_size: int, intermediate_size: int, read: Read
) -> tuple[tuple[str, ...], Callable[[int], dict[str, torch.Tensor]]]:
    """Checks all of `layout` against the sizes; reads nothing.

    Returns the fields of ExpertTensors that the layer has, and what reads them for one expert.

    Raises ValueError naming file and tensor for a wrong number of experts, shape or dtype.
    """
    sizes = num_experts, hidden_size, intermediate_size
    try:
        if isinstance(layout, PerExpert):
            _check_per_expert(layout, *sizes)
            has_biases = "gate_bias" in layout.experts[0]
        else:
            arrangement = _check_stacked(layout, *sizes)
            has_biases = arrangement.gate_up_bias is not None
    except ValueError as error:
        raise ValueError(f"{error}{_other_model(layout, sizes)}") from None
    fields = MATRICES + BIASES if has_biases else MATRICES
    if isinstance(layout, PerExpert):
        return fields, lambda expert: _read_per_expert(layout.experts[expert], read)
    return fields, lambda expert: _read_stacked(layout, arrangement, expert, read)


def _other_model(layout: Layout, expected: tuple[int, int, int]) -> str:
    """All sizes side by side, where the layer as a whole has others than expected."""
    try:
        found = infer_sizes(layout)
    except ValueError:
        return ""
    if found == expected:
        return ""

    def text(sizes: tuple[int, int, int]) -> str:
        return "{} experts of hidden size {} and intermediate size {}".format(*sizes)

    return f"; the checkpoint has {text(found)} there, expected are {text(expected)}"


def read_layer(
    layout: Layout,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    wanted: Sequence[int],
    read: Read,
) -> ExpertTensors:
    """Checks `layout` as `layer_reader` does, then reads the experts in `wanted`."""
    sizes = num_experts, hidden_size, intermediate_size
    fields, read_expert = layer_reader(layout, *sizes, read)
    parts = {e: read_expert(e) for e in wanted}
    return ExpertTensors(
        **{f: [parts[e][f] if e in parts else None for e in range(num_experts)] for f in fields}
    )


def _check_rank(info: TensorInfo, rank: int) -> None:
    if len(info.shape) != rank:
        raise ValueError(f"{info} has shape {list(info.shape)}, expected {rank} dimensions")


def _check(info: TensorInfo, shape: Sequence[int], dtype: str | None) -> None:
    if info.dtype not in DTYPES:
        raise ValueError(
            f"{info} has dtype {info.dtype}; expected {', '.join(DTYPES)} (quantised experts are"
            " not supported yet)"
        )
    if dtype and info.dtype != dtype:
        raise ValueError(f"{info} has dtype {info.dtype}; expected {dtype} as in the first expert")
    if info.shape != tuple(shape):
        raise ValueError(f"{info} has shape {list(info.shape)}; expected {list(shape)}")


def _check_per_expert(layout: PerExpert, num_experts: int, hidden: int, inter: int) -> None:
    experts = layout.experts
    if len(experts) != num_experts:
        last = experts[-1]["down"]
        raise ValueError(
            f"{last} belongs to the last of {len(experts)} experts in {layout.where!r};"
            f" num_experts is {num_experts}"
        )
    shapes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    shapes |= {"gate_bias": (inter,), "up_bias": (inter,), "down_bias": (hidden,)}
    dtype = experts[0]["gate"].dtype
    for expert in experts:
        for field, info in expert.items():
            _check(info, shapes[field], dtype if field in MATRICES else None)


def _stacked_shapes(
    s: Stacked, experts: int, hidden: int, inter: int
) -> dict[str, tuple[int, ...]]:
    gate_up, down = (2 * inter, hidden), (hidden, inter)
    return {
        "gate_up": (experts, *(gate_up[::-1] if s.columns else gate_up)),
        "down": (experts, *(down[::-1] if s.columns else down)),
        "gate_up_bias": (experts, 2 * inter),
        "down_bias": (experts, hidden),
    }


def _check_stacked(layout: StackedExperts, num_experts: int, hidden: int, inter: int) -> Stacked:
    tensors = layout.tensors
    chosen = layout.candidates[0]
    for candidate in layout.candidates:
        shapes = _stacked_shapes(candidate, num_experts, hidden, inter)
        if all(tensors[f].shape == shapes[f] for f in ("gate_up", "down")):
            chosen = candidate
    shapes = _stacked_shapes(chosen, num_experts, hidden, inter)
    for field, info in tensors.items():
        _check(info, shapes[field], None if field.endswith("bias") else tensors["gate_up"].dtype)
    return chosen


def _read_per_expert(expert: dict[str, TensorInfo], read: Read) -> dict[str, torch.Tensor]:
    return {f: read(i, None).float() if f in BIASES else read(i, None) for f, i in expert.items()}


def _read_stacked(
    layout: StackedExperts, s: Stacked, expert: int, read: Read
) -> dict[str, torch.Tensor]:
    part = {field: read(info, expert) for field, info in layout.tensors.items()}
    gate_up, down = part["gate_up"], part["down"]
    if s.columns:
        gate_up, down = gate_up.T, down.T
    gate, up = _halves(gate_up, s.interleaved)
    result = {"gate": gate.contiguous(), "up": up.contiguous(), "down": down.contiguous()}
    if s.gate_up_bias:
        gate, up = _halves(part["gate_up_bias"], s.interleaved)
        result |= {"gate_bias": gate.float().contiguous(), "up_bias": up.float().contiguous()}
        result["down_bias"] = part["down_bias"].float()
    return result


def _halves(gate_up: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return gate_up[::2], gate_up[1::2]
    half = gate_up.shape[0] // 2
    return gate_up[:half], gate_up[half:]
