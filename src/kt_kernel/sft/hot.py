"""`HotExperts`: the experts of a layer that are computed with torch, on the device of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        adapters = [t.to(base.dtype) for t in lora]
        rows = _rows(x, tokens).to(base.dtype)
        parts = [
            self._run(run, rows[run.begin : run.end], [t[run.experts] for t in adapters])
            for run in _runs(counts)
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

    def _run(
        self, run: _Run, rows: torch.Tensor, lora: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The outputs of a run of experts for its rows: the part of down's base weights, and that
        of LoRA."""
        places = run.places(rows.device)
        padded = rows.new_zeros(len(run.counts) * run.most, rows.shape[1])
        x = padded.index_copy(0, places, rows).view(len(run.counts), run.most, -1)
        gate, up = (torch.add(*self._project(which, run, x, lora)) for which in (0, 1))
        if self._limit > 0:
            gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        if self._alpha != 0:
            h = gate * torch.sigmoid(self._alpha * gate) * (up + 1)
        else:
            h = functional.silu(gate) * up
        plain, low = self._project(2, run, h, lora)
        return (
            plain.flatten(0, 1).index_select(0, places),
            low.flatten(0, 1).index_select(0, places),
        )

    def _project(
        self, which: int, run: _Run, x: torch.Tensor, lora: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of x [experts of the run, rows, in]: the products with base weights, and LoRA's."""
        bias = getattr(self, BIASES[which], None)
        weight = getattr(self, f"{MATRICES[which]}_proj")[run.experts]
        out = torch.bmm(x, weight.mT)
        if bias is not None:
            out = out + bias[run.experts, None]
        a, b = lora[2 * which], lora[2 * which + 1]
        dropped = functional.dropout(x, self._dropout, self.training)
        term = self._scaling * torch.bmm(torch.bmm(dropped, a.mT), b.mT)
        return out, term.detach() if self._skip else term


@dataclass(frozen=True)
class _Run:
    """Successive hot experts that are computed by one batched product, each with as many rows as
    the one with most.

    experts: their positions among the hot ones. counts: their rows. begin: the first of these in
    the rows of all hot experts.
    """

    experts: slice
    counts: list[int]
    begin: int

    @property
    def end(self) -> int:
        return self.begin + sum(self.counts)

    @property
    def most(self) -> int:
        return max(self.counts)

    def places(self, device: torch.device) -> torch.Tensor:
        """Where each row lies among the padded ones."""
        counts = torch.tensor(self.counts)
        shift = torch.arange(len(counts)) * self.most - (counts.cumsum(0) - counts)
        places = torch.arange(int(counts.sum())) + shift.repeat_interleave(counts)
        return places.to(device, non_blocking=True)


# A run has at most twice the rows that its experts have, and so many more.
_SPARE_ROWS = 1024


def _runs(counts: Sequence[int]) -> list[_Run]:
    """All experts with rows, in as few runs as is possible from left to right. One launch of a
    kernel for many experts instead of one for each is what counts: a GPU computes an expert faster
    than Python launches its kernels."""
    runs: list[_Run] = []
    first = begin = end = most = 0  # of the run so far: its experts, and its rows
    for expert, count in enumerate(counts):
        if (expert + 1 - first) * max(most, count) > 2 * (end + count - begin) + _SPARE_ROWS:
            runs.append(_Run(slice(first, expert), list(counts[first:expert]), begin))
            first, begin, most = expert, end, 0
        most, end = max(most, count), end + count
    runs.append(_Run(slice(first, len(counts)), list(counts[first:]), begin))
    return [run for run in runs if any(run.counts)]


# Sums of rows, forward and in the gradient of `_rows`, have a fixed order, so that a run gives the
# same bits again. On a GPU index_put has one, because it sorts the indices. On the CPU several
# threads of index_put add at once, and index_add has one.


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return tensor[index] if tensor.is_cuda else tensor.index_select(0, index)


def _sum_rows(out: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    if out.is_cuda:
        return out.index_put((index,), rows, accumulate=True)
    return out.index_add(0, index, rows)
