"""A layer's LoRA tensors as a PEFT adapter has them.

PEFT (0.17 and later) has two forms of adapters for experts. Modules ``nn.Linear`` of single experts
have A [R, in] and B [out, R] each. A 3-D parameter of all experts, a target of
``target_parameters``, has A [E r, in], expert by expert, and B [out, r E], where column j E + e is
column j of expert e. A parameter ``gate_up_proj`` is adapted as one matrix [2I, H], so gate and up
share its A. With r = 2R, A of both stacked and B block diagonal, it stands for separate ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..weights.expert_tensors import MATRICES
from .lora import LORA_NAMES

#: Tensors by what follows the module's name, and the six LoRA tensors by their names.
Tensors = dict[str, torch.Tensor]

# `down_proj`, adapted last, is around `gate_up_proj`, which is around the module.
_GATE_UP, _DOWN = "base_layer.", ""


@dataclass(frozen=True)
class Layout:
    """How a module's experts are arranged.

    Attributes:
        interleaved: rows of gate and up alternate in ``gate_up_proj``; else gate's come first.
        names: of the modules of one expert, for gate, up and down, in checkpoints with such.
        block: what those checkpoints call the MoE block, where it is not what the model calls it.
        single: whether there are such checkpoints.
    """

    interleaved: bool = False
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    block: str | None = None
    single: bool = True

    def single_path(self, path: str) -> str:
        """The name of the list of experts, of a module's name in the model."""
        if self.block is None:
            return path
        parent, _, experts = path.rpartition(".")
        return f"{parent.rpartition('.')[0]}.{self.block}.{experts}"


def to_fused(lora: Mapping[str, torch.Tensor], layout: Layout) -> Tensors:
    """The adapter of two 3-D parameters; that of ``gate_up_proj`` has rank 2R."""
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
    """The six LoRA tensors of rank R of an adapter of 3-D parameters.

    ``gate_up_proj`` has rank 2R as `to_fused` makes it, or R with an A that gate and up share.

    Raises:
        KeyError: a tensor is missing.
        ValueError: shapes or ranks do not fit, or B of rank 2R is not block diagonal.
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
                f"gate_up_proj has rank {found}, gate and up share its A; wrap the experts with "
                f"lora_rank={found}"
            )
        gate_b, up_b = gate_b[..., :rank], up_b[..., rank:]
    else:
        raise ValueError(
            f"gate_up_proj has rank {found}; lora_rank={rank} takes {rank} or {2 * rank}"
        )
    return _named(gate_a, gate_b, up_a, up_b, down_a, down_b)


def to_single(lora: Mapping[str, torch.Tensor], layout: Layout) -> Tensors:
    """The adapter of every expert's own modules."""
    single = {}
    for matrix, name in zip(MATRICES, layout.names, strict=True):
        for side in "ab":
            stack = lora[f"{matrix}_lora_{side}"].detach().cpu()
            for expert, tensor in enumerate(stack):
                # A copy: files have no tensors that share memory.
                single[f"{expert}.{name}.lora_{side.upper()}.weight"] = tensor.clone()
    return single


def from_single(tensors: Tensors, experts: int, layout: Layout) -> Tensors:
    """The six LoRA tensors of an adapter of every expert's own modules.

    Raises:
        KeyError: a tensor is missing.
        ValueError: the experts' tensors differ in shape.
    """
    stacks = []
    for name in layout.names:
        for side in "AB":
            keys = [f"{expert}.{name}.lora_{side}.weight" for expert in range(experts)]
            each = [tensors[key] for key in keys]
            for key, tensor in zip(keys, each, strict=True):
                if tensor.shape != each[0].shape:
                    raise ValueError(
                        f"{key} is {list(tensor.shape)}, {keys[0]} {list(each[0].shape)}"
                    )
            stacks.append(torch.stack(each))
    return _named(*stacks)


def _named(*tensors: torch.Tensor) -> Tensors:
    return dict(zip(LORA_NAMES, tensors, strict=True))


def _columns(b: torch.Tensor) -> torch.Tensor:
    """[out, r E] of B [E, out, r]."""
    return b.permute(1, 2, 0).flatten(1).contiguous()


def _by_expert(tensors: Tensors, key: str, experts: int) -> torch.Tensor:
    """B [E, out, r] of [out, r E]."""
    b = tensors[key]
    if b.dim() != 2 or b.shape[1] % experts:
        raise ValueError(f"{key} is {list(b.shape)}; [out, rank * {experts} experts] is needed")
    return b.unflatten(1, (-1, experts)).permute(2, 0, 1)


def _experts(tensors: Tensors, key: str, experts: int) -> torch.Tensor:
    """A [E, r, in] of [E r, in]."""
    a = tensors[key]
    if a.dim() != 2 or a.shape[0] % experts:
        raise ValueError(f"{key} is {list(a.shape)}; [{experts} experts * rank, in] is needed")
    return a.unflatten(0, (experts, -1))
