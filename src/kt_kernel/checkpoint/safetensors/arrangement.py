"""Computes the shapes of stacked experts from sizes and an arrangement, and the reverse."""

from __future__ import annotations

import torch

from ..header import TensorInfo
from .codes import NIBBLES
from .families import Stacked
from .layout import StackedExperts

Shape = tuple[int, ...]


def stacked_shapes(
    s: Stacked, experts: int, hidden: int, inter: int, codes: int = 1
) -> dict[str, Shape]:
    """Shapes by field, for weights with this many `codes` per element along the columns."""
    one, two = (inter, hidden // codes), (2 * inter, hidden // codes)
    down = (hidden, inter // codes)
    matrices = {"gate_up": two, "gate": one, "up": one, "down": down}
    biases = {"gate_up_bias": (2 * inter,), "down_bias": (hidden,)}
    return {
        **{f: (experts, *(m[::-1] if s.columns else m)) for f, m in matrices.items()},
        **{f: (experts, *bias) for f, bias in biases.items()},
    }


def codes_per_element(info: TensorInfo) -> int:
    """Codes in one element of a weight tensor: two if a byte holds two."""
    return 2 if info.dtype in NIBBLES and info.dtype != "F4" else 1


def infer_arrangement(layout: StackedExperts) -> tuple[Stacked, tuple[int, int, int]]:
    """The candidate that matches the weights' shapes, and (num_experts, hidden_size,
    moe_intermediate_size). Raises ValueError naming file and tensor if none matches."""
    down = layout.tensors["down"]
    weights = {f: info for f, info in layout.tensors.items() if f in ("gate_up", "gate", "up")}
    for info in (*weights.values(), down):
        if len(info.shape) != 3:
            raise ValueError(f"{info} has shape {list(info.shape)}, expected 3 dimensions")
    for codes in (codes_per_element, lambda _: 1):  # bytes may also be 8-bit integers
        for candidate in layout.candidates:
            experts, hidden, inter = down.shape
            if candidate.columns:
                hidden, inter = inter, hidden
            sizes = experts, hidden, inter * codes(down)
            if all(
                info.shape == stacked_shapes(candidate, *sizes, codes(info))[f]
                for f, info in weights.items()
            ):
                return candidate, sizes
    info = next(iter(weights.values()))
    raise ValueError(
        f"{info} has shape {list(info.shape)} and dtype {info.dtype}, which does not match {down}"
        f" of shape {list(down.shape)} and dtype {down.dtype}"
    )


def halves(gate_up: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate's part and up's part along the first dimension."""
    if interleaved:
        return gate_up[::2], gate_up[1::2]
    half = gate_up.shape[0] // 2
    return gate_up[:half], gate_up[half:]
