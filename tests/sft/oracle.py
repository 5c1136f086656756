"""The layer with LoRA in float64, differentiable by autograd: what all else is compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kt_kernel.sft.lora import LORA_NAMES

MATRICES = ("gate", "up", "down")


@dataclass
class Weights:
    """Dequantised base weights of a layer, float64, one row for each slot."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    biases: Mapping[str, torch.Tensor] | None = None
    on_gpu: Sequence[bool] = ()
    limit: float = 0.0
    alpha: float = 0.0


def layer_with_lora(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    base: Weights,
    lora: Sequence[torch.Tensor] | None,
    scaling: float,
    drop=lambda x, which: x,
    through_lora: bool = True,
) -> torch.Tensor:
    """y [T, H] of x [T, H], ids [T, k] and scores [T, k].

    lora: the six tensors by slot; None leaves their terms out. drop(x, which) is applied to the
    input of an A matrix.
    """
    named = dict(zip(LORA_NAMES, lora, strict=True)) if lora is not None else None

    def linear(x: torch.Tensor, which: str, slot: int) -> tuple[torch.Tensor, torch.Tensor | float]:
        """What the base weights make of x, and what LoRA adds."""
        out, added = x @ getattr(base, which)[slot].T, 0.0
        if base.biases is not None:
            out = out + base.biases[f"{which}_bias"][slot]
        if named is not None:
            a, b = named[f"{which}_lora_a"][slot], named[f"{which}_lora_b"][slot]
            added = constant(scaling * drop(x, which) @ a.T @ b.T)
        return out, added

    def constant(term: torch.Tensor) -> torch.Tensor:
        return term if through_lora else term.detach()

    y = torch.zeros_like(x)
    for slot in range(len(base.gate)):
        if base.on_gpu and base.on_gpu[slot]:
            continue
        for choice in range(ids.shape[1]):
            rows = (ids[:, choice] == slot).nonzero().flatten()
            if not len(rows):
                continue
            gate, up = (sum(linear(x[rows], which, slot)) for which in ("gate", "up"))
            if base.limit:
                gate, up = gate.clamp(max=base.limit), up.clamp(-base.limit, base.limit)
            if base.alpha:
                h = gate * torch.sigmoid(base.alpha * gate) * (up + 1)
            else:
                h = torch.nn.functional.silu(gate) * up
            out, added = linear(h, "down", slot)
            score = scores[rows, choice, None]
            y = y.index_add(0, rows, out * score + constant(added * score))
    return y


@dataclass
class Gradients:
    y: torch.Tensor
    x: torch.Tensor
    scores: torch.Tensor
    lora: list[torch.Tensor]
    base: list[torch.Tensor]


@torch.enable_grad()
def gradients(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    base: Weights,
    lora: Sequence[torch.Tensor],
    scaling: float,
    grad_output: torch.Tensor,
    *,
    through_lora: bool = True,
    full: bool = False,
    **options,
) -> Gradients:
    """Output and gradients of `layer_with_lora`. ``through_lora`` False: backward takes LoRA's
    terms for constants. ``full``: also of the base weights."""
    x, scores = (t.detach().double().requires_grad_() for t in (x, scores))
    leaves = [t.detach().double().requires_grad_() for t in lora]
    weights = []
    if full:
        weights = [getattr(base, name).detach().requires_grad_() for name in MATRICES]
        base = replace(base, **dict(zip(MATRICES, weights, strict=True)))
    y = layer_with_lora(x, ids, scores, base, leaves, scaling, through_lora=through_lora, **options)
    wanted = [x, scores, *leaves, *weights]
    found = torch.autograd.grad(y, wanted, grad_output.double(), allow_unused=True)
    grads = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]
    return Gradients(y.detach(), grads[0], grads[1], grads[2:8], grads[8:])
