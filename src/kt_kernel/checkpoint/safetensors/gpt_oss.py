"""Stacked MXFP4 experts, as gpt-oss stores them.

gate_up_proj_blocks uint8 [E, 2I, H/32, 16] and gate_up_proj_scales [E, 2I, H/32], with gate in the
even rows; down_proj_blocks [E, H, I/32, 16] and down_proj_scales; biases [E, 2I] and [E, H]. The
low nibble comes first.
"""

from __future__ import annotations

from ...weights.expert_tensors import Matrix
from .arrangement import halves
from .families import Stacked
from .layout import StackedExperts
from .mx import BLOCK, stacked_matrix
from .parts import FLOATS, UE8M0, Read, check_tensor


def check_blocks(layout: StackedExperts, experts: int, hidden: int, inter: int) -> None:
    """Checks dtypes and shapes. Raises ValueError naming file and tensor."""
    tensors = layout.tensors
    for size in (hidden, inter):
        if size % BLOCK:
            raise ValueError(
                f"{tensors['down']}: MXFP4 needs sizes that are multiples of {BLOCK}; got {size}"
            )
    shapes = {
        "gate_up": (experts, 2 * inter, hidden // BLOCK, BLOCK // 2),
        "down": (experts, hidden, inter // BLOCK, BLOCK // 2),
        "gate_up_scales": (experts, 2 * inter, hidden // BLOCK),
        "down_scales": (experts, hidden, inter // BLOCK),
        "gate_up_bias": (experts, 2 * inter),
        "down_bias": (experts, hidden),
    }
    for field, info in tensors.items():
        dtypes = FLOATS if field.endswith("bias") else UE8M0 if "scales" in field else ("U8",)
        check_tensor(info, dtypes, shapes[field])


def size_of_blocks(layout: StackedExperts) -> tuple[int, int, int]:
    """(num_experts, hidden_size, moe_intermediate_size) according to the shape of down."""
    info = layout.tensors["down"]
    if len(info.shape) != 4:
        raise ValueError(f"{info} has shape {list(info.shape)}, expected 4 dimensions")
    return info.shape[0], info.shape[1], info.shape[2] * BLOCK


def read_blocks(
    layout: StackedExperts, arrangement: Stacked, expert: int, read: Read
) -> dict[str, Matrix]:
    """Reads one expert. Biases become float32."""
    tensors = layout.tensors
    part = {field: read(info, expert) for field, info in tensors.items()}
    info = tensors["gate_up_scales"]
    blocks, scales, biases = (
        halves(part[field], arrangement.interleaved)
        for field in ("gate_up", "gate_up_scales", "gate_up_bias")
    )
    result: dict[str, Matrix] = {}
    for i, name in enumerate(("gate", "up")):
        result[name] = stacked_matrix(blocks[i], scales[i], info)
        result[f"{name}_bias"] = biases[i].float().contiguous()
    result["down"] = stacked_matrix(part["down"], part["down_scales"], tensors["down_scales"])
    result["down_bias"] = part["down_bias"].float()
    return result
