"""Fused experts of transformers 5 written out, with an `nn.Linear` for every projection."""

from __future__ import annotations

import torch
from torch import nn

from kt_kernel.sft.families import is_fused, open_fused


class _Expert(nn.Module):
    def __init__(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        for name, weight in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            linear = nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
            linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
            setattr(self, name, linear)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Experts(nn.ModuleList):
    def forward(
        self, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        y = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            rows, choices = (ids == number).nonzero(as_tuple=True)
            if len(rows):
                out = expert(hidden_states[rows]) * weights[rows, choices, None]
                y = y.index_add(0, rows, out.to(y.dtype))
        return y


def write_out(model: nn.Module) -> nn.Module:
    """The model itself, changed."""
    # PEFT, which knows the family's experts to be fused, would look for those.
    model.config.model_type = "written_out"
    for name, module in list(model.named_modules()):
        if is_fused(module):
            each = open_fused(name, module).weights()
            experts = _Experts(_Expert(*matrices) for matrices in zip(*each.values(), strict=True))
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, experts)
    return model
