"""`HotExperts`: the experts of a layer that are computed with torch, on the device of the model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from ..weights.expert_tensors import BIASES, MATRICES
from .families import Fused


class HotExperts(nn.Module):
    """Some experts of a layer, with LoRA: what the wrapper computes on the CPU for the others.

    The base weights are frozen buffers that move with the model and are not in ``state_dict()``.
    Every projection computes ``x Wᵀ + scaling * dropout(x) Aᵀ Bᵀ`` in the dtype of the base
    weights.

    Args:
        fused: all experts of the layer; those that are hot are copied.
        slots: the hot ones, ascending.
        scaling: alpha / R.
        dropout: probability, on the inputs of A.
        skip_lora_grads: whether backward leaves the LoRA terms out.
    """

    gate_proj: torch.Tensor
    _positions: torch.Tensor

    def __init__(
        self,
        fused: Fused,
        slots: Sequence[int],
        *,
        scaling: float,
        dropout: float,
        skip_lora_grads: bool,
    ) -> None:
        super().__init__()
        weights = fused.weights()
        self.slots = list(slots)
        index = torch.tensor(slots, device=weights["gate_proj"].device)
        for name, tensor in weights.items():
            self.register_buffer(name, tensor.index_select(0, index), persistent=False)
        experts = len(weights["gate_proj"])
        positions = torch.full((experts,), len(slots), device=index.device)
        positions[index] = torch.arange(len(slots), device=index.device)
        self.register_buffer("_positions", positions, persistent=False)  # of cold ones: the last
        self._scaling, self._dropout, self._skip = scaling, dropout, skip_lora_grads
        self._limit, self._alpha = fused.swiglu_limit, fused.swiglu_alpha

    def forward(
        self,
        hidden_states: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        lora: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """The weighted sum of the hot experts.

        Args:
            hidden_states: [T, H]. expert_ids, weights: [T, k]; other experts' ids are skipped.
            lora: the six tensors of the hot experts, see `of_hot`.

        Returns:
            [T, H], in the dtype of ``hidden_states``.
        """
        x, count = hidden_states, len(self.slots)
        base = self.gate_proj
        experts = len(self._positions)
        inside = (expert_ids >= 0) & (expert_ids < experts)
        position = self._positions[expert_ids.clamp(0, experts - 1).long()]
        position = torch.where(inside, position, count).flatten()
        counts = position.bincount(minlength=count + 1)[:count].tolist()
        routes = position.argsort(stable=True)[: sum(counts)]
        tokens = routes // expert_ids.shape[1]
        adapters = zip(*(t.to(base.dtype).unbind(0) for t in lora), strict=True)
        parts = [
            self._expert(expert, rows, adapter)
            for expert, (rows, adapter) in enumerate(
                zip(_rows(x, tokens).to(base.dtype).split(counts), adapters, strict=True)
            )
            if len(rows)
        ]
        out = x.new_zeros(x.shape, dtype=torch.float32)
        if not parts:
            return out.to(x.dtype)
        plain, low = (torch.cat(part).float() for part in zip(*parts, strict=True))
        weight = weights.flatten()[routes, None].float()
        routed = plain * weight + low * (weight.detach() if self._skip else weight)
        return _sum_rows(out, tokens, routed).to(x.dtype)

    def slots_on(self, device: torch.device) -> torch.Tensor:
        """The hot slots as an index."""
        return torch.tensor(self.slots, device=device)

    def of_hot(self, lora: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The hot experts' part of tensors of all experts, which alone moves to the device."""
        device = self.gate_proj.device
        return tuple(t.index_select(0, self.slots_on(t.device)).to(device) for t in lora)

    def _expert(
        self, expert: int, rows: torch.Tensor, lora: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The expert's output for its rows: the part of down's base weights, and that of LoRA."""
        gate, up = (torch.add(*self._project(which, expert, rows, lora)) for which in (0, 1))
        if self._limit > 0:
            gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        if self._alpha != 0:
            h = gate * torch.sigmoid(self._alpha * gate) * (up + 1)
        else:
            h = functional.silu(gate) * up
        return self._project(2, expert, h, lora)

    def _project(
        self, which: int, expert: int, rows: torch.Tensor, lora: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        bias = getattr(self, BIASES[which], None)
        weight = getattr(self, f"{MATRICES[which]}_proj")[expert]
        out = functional.linear(rows, weight, None if bias is None else bias[expert])
        a, b = lora[2 * which], lora[2 * which + 1]
        dropped = functional.dropout(rows, self._dropout, self.training)
        term = self._scaling * functional.linear(functional.linear(dropped, a), b)
        return out, term.detach() if self._skip else term


# Sums of rows, forward and in the gradient of `_rows`, have a fixed order, so that a run gives the
# same bits again. On a GPU index_put has one, because it sorts the indices. On the CPU several
# threads of index_put add at once, and index_add has one.


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return tensor[index] if tensor.is_cuda else tensor.index_select(0, index)


def _sum_rows(out: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if out.is_cuda:
        return out.index_put((index,), rows, accumulate=True)
    return out.index_add(0, index, rows)
