"""Converts a layer's LoRA tensors to and from the layouts of PEFT adapters.

PEFT (0.17 and later) stores adapters of experts in two layouts. An expert's own ``nn.Linear`` has
A [R, in] and B [out, R]. A 3-D parameter with all experts, listed in ``target_parameters``, has
A [E r, in], one expert after the other, and B [out, r E]: column j E + e is column j of expert e.
PEFT adapts a parameter ``gate_up_proj`` as one matrix [2I, H], so gate and up share one A. To keep
their As separate, the rank is r = 2R: both As are stacked, and B is block diagonal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..weights.expert_tensors import MATRICES
from .lora import LORA_NAMES

#: Tensors by the part of their name that follows the module's, or the six LoRA tensors by name.
Tensors = dict[str, torch.Tensor]

# PEFT wraps the module for `gate_up_proj` first, and the result for `down_proj`.
_GATE_UP, _DOWN = "base_layer.", ""


@dataclass(frozen=True)
class Layout:
    """How a module's experts are arranged.

    Attributes:
        interleaved: whether rows of gate and up alternate in ``gate_up_proj``. If not, all rows of
            gate come first.
        names: names of an expert's gate, up and down modules in checkpoints that list each expert.
        block: the name of the MoE block in those checkpoints, if the model uses another one.
        single: whether such checkpoints exist for this family.
    """

    interleaved: bool = False
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    block: str | None = None
    single: bool = True

    def single_path(self, path: str) -> str:
        """The name of the list of experts in a checkpoint, from the module's name in the model."""
        if self.block is None:
            return path
        parent, _, experts = path.rpartition(".")
        return f"{parent.rpartition('.')[0]}.{self.block}.{experts}"


def to_fused(lora: Mapping[str, torch.Tensor], layout: Layout) -> Tensors:
    """Returns the adapters of both 3-D parameters. The one of ``gate_up_proj`` has rank 2R."""
    gate_a, gate_b, up_a, up_b, down_a, down_b = (t.detach().cpu() for t in lora.values())
    experts, inter, rank = gate_b.shape
    both = gate_b.new_zeros(experts, 2, inter, 2 * rank)
    both[:, 0, :, :rank] = gate_b
    both[:, 1, :, rank:] = up_b
    rows = both.transpose(1, 2) if layout.interleaved else both
    return {
        f"{_GATE_UP}lora_A.weight": torch.cat([gate_a, up_a], 1).flatten(0, 1).contiguous(),
        f"{_GATE_UP}lora_B.weight": _columns(rows.flatten(1, 2)),
        f"{_DOWN}lora_A.weight": down_a.flatten(0, 1).contiguous(),
        f"{_DOWN}lora_B.weight": _columns(down_b),
    }


def from_fused(tensors: Tensors, experts: int, rank: int, layout: Layout) -> Tensors:
    """Returns the six LoRA tensors of rank R from the adapters of both 3-D parameters.

    The adapter of ``gate_up_proj`` has rank 2R, as `to_fused` writes it, or rank R if gate and up
    share A.

    Raises:
        KeyError: A tensor is missing.
        ValueError: Shapes or ranks do not match, or B of rank 2R is not block diagonal.
    """
    both_a = _experts(tensors, f"{_GATE_UP}lora_A.weight", experts)
    both_b = _by_expert(tensors, f"{_GATE_UP}lora_B.weight", experts)
    down_a = _experts(tensors, f"{_DOWN}lora_A.weight", experts)
    down_b = _by_expert(tensors, f"{_DOWN}lora_B.weight", experts)
    if layout.interleaved:
        gate_b, up_b = both_b[:, 0::2], both_b[:, 1::2]
    else:
        gate_b, up_b = both_b.chunk(2, 1)
    found = both_a.shape[1]
    if found == rank:
        gate_a = up_a = both_a
    elif found == 2 * rank:
        gate_a, up_a = both_a.chunk(2, 1)
        if bool(gate_b[..., rank:].any()) or bool(up_b[..., :rank].any()):
            raise ValueError(
                f"gate_up_proj has rank {found}, and gate and up share its A; wrap the experts "
                f"with lora_rank={found}"
            )
        gate_b, up_b = gate_b[..., :rank], up_b[..., rank:]
    else:
        raise ValueError(
            f"gate_up_proj has rank {found}; lora_rank={rank} needs rank {rank} or {2 * rank}"
        )
    return _named(gate_a, gate_b, up_a, up_b, down_a, down_b)


def to_single(lora: Mapping[str, torch.Tensor], layout: Layout) -> Tensors:
    """Returns the adapters of each expert's own modules."""
    single = {}
    for matrix, name in zip(MATRICES, layout.names, strict=True):
        for side in "ab":
            stack = lora[f"{matrix}_lora_{side}"].detach().cpu()
            for expert, tensor in enumerate(stack):
                # Copied, because safetensors files cannot hold tensors that share memory.
                single[f"{expert}.{name}.lora_{side.upper()}.weight"] = tensor.clone()
    return single


def from_single(tensors: Tensors, experts: int, layout: Layout) -> Tensors:
    """Returns the six LoRA tensors from the adapters of each expert's own modules.

    Raises:
        KeyError: A tensor is missing.
        ValueError: The experts' tensors differ in shape.
    """
    stacks = []
    for name in layout.names:
        for side in "AB":
            keys = [f"{expert}.{name}.lora_{side}.weight" for expert in range(experts)]
            each = [tensors[key] for key in keys]
            for key, tensor in zip(keys, each, strict=True):
                if tensor.shape != each[0].shape:
                    raise ValueError(
                        f"{key} has shape {list(tensor.shape)}, but {keys[0]} has "
                        f"{list(each[0].shape)}"
                    )
            stacks.append(torch.stack(each))
    return _named(*stacks)


def _named(*tensors: torch.Tensor) -> Tensors:
    return dict(zip(LORA_NAMES, tensors, strict=True))


def _columns(b: torch.Tensor) -> torch.Tensor:
    """B [E, out, r] as [out, r E]."""
    return b.permute(1, 2, 0).flatten(1).contiguous()


def _by_expert(tensors: Tensors, key: str, experts: int) -> torch.Tensor:
    """B stored as [out, r E], as [E, out, r]."""
    b = tensors[key]
    if b.dim() != 2 or b.shape[1] % experts:
        raise ValueError(
            f"{key} has shape {list(b.shape)}; expected [out, rank * {experts} experts]"
        )
    return b.unflatten(1, (-1, experts)).permute(2, 0, 1)


def _experts(tensors: Tensors, key: str, experts: int) -> torch.Tensor:
    """A stored as [E r, in], as [E, r, in]."""
    a = tensors[key]
    if a.dim() != 2 or a.shape[0] % experts:
        raise ValueError(
            f"{key} has shape {list(a.shape)}; expected [{experts} experts * rank, in]"
        )
    return a.unflatten(0, (experts, -1))
