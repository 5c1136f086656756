"""Published models: their MoE layers, and the size of their packed experts."""

from __future__ import annotations

from typing import NamedTuple

from methods import METHODS
from shapes import SHAPES, Shape

from kt_kernel import _C


class Model(NamedTuple):
    """layers: the number of MoE layers."""

    layers: int
    shape: Shape


MODELS = {
    "Qwen3-30B-A3B": Model(48, SHAPES["qwen3-30b-a3b"]),
    "Mixtral-8x7B": Model(32, SHAPES["mixtral"]),
    "GLM-4.5-Air": Model(45, Shape("glm-4.5-air", 128, 4096, 1408, 8)),
    "Qwen3-235B-A22B": Model(94, Shape("qwen3-235b-a22b", 128, 4096, 1536, 8)),
    "DeepSeek-V3": Model(58, SHAPES["deepseek-v3"]),
    "Kimi-K2": Model(60, SHAPES["kimi-k2"]),
}


def expert_bytes(method: str, shape: Shape) -> int:
    """The packed bytes of one expert."""
    form = METHODS[method].form
    gate = _C.packed_shape(*form, shape.inter, shape.hidden)
    down = _C.packed_shape(*form, shape.hidden, shape.inter)
    return 2 * gate[0] * gate[1] + down[0] * down[1]
