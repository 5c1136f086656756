"""The expected answers of an engine that defers experts: transformers with the rule of deferral."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tiny_model import EXPERTS, LAYERS, TOP_K, Reference

from kt_kernel.moe.routing import select_deferred_experts
from kt_kernel.testing import moe_reference

ROUTE_GAP = 0.06  # of a router's probability; smaller gaps are unclear in bfloat16


@contextmanager
def deferring(reference: Reference, deferred: int, cold: range) -> Iterator[None]:
    """Makes MoE layers defer cold experts inside, as `KTMoEWrapper` defines deferral."""
    hot = torch.tensor([expert not in cold for expert in range(EXPERTS)])
    carry: list[torch.Tensor | None] = [None]

    def replacement(layer: int, module: torch.nn.Module) -> Callable[..., torch.Tensor]:
        gate, up = module.gate_up_proj.data.chunk(2, 1)
        weights = (gate, up, module.down_proj.data)

        def forward(x: torch.Tensor, ids: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
            def on_cpu(ids: torch.Tensor) -> torch.Tensor:
                return moe_reference(x, ids, router, *weights, gpu_experts_mask=hot)

            y = moe_reference(x, ids, router, *weights, gpu_experts_mask=~hot, rounded=False)
            before = carry[0] if layer > 0 else None
            now, later = select_deferred_experts(ids, router, TOP_K - deferred)
            if layer == LAYERS - 1:
                now, carry[0] = ids, None
            else:
                carry[0] = on_cpu(later)
            y = y + on_cpu(now)
            return (y if before is None else y + before).to(x.dtype)

        return forward

    with reference.replacing(replacement):
        yield


@torch.no_grad()
def stepwise_logits(reference: Reference, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Logits of given tokens [steps, V], computed in the engine's passes: the prompt, then
    tokens."""
    out = reference.model(torch.tensor([prompt]), use_cache=True)
    logits = [out.logits[0, -1]]
    for token in tokens[:-1]:
        out = reference.model(
            torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True
        )
        logits.append(out.logits[0, -1])
    return torch.stack(logits)


def check_deferred(
    answer: dict[str, Any],
    reference: Reference,
    prompt: list[int],
    deferred: int,
    cold: range,
    *,
    near: float,
    gap: float,
    rounded: bool = False,
    far: float = 5,
) -> None:
    """Tokens and log-probabilities of one request follow the rule in transformers.

    near: the largest mean distance of log-probabilities. Without the rule, the distance must be
    ``far`` times as large. gap: of logits, above which the best token is clear; half of the tokens
    must be clear. With ``rounded`` (to bfloat16), other experts may be chosen or deferred in single
    steps. Then the median counts, and only tokens whose experts are clear, too, a quarter of all.
    """
    assert "error" not in answer, answer
    (tokens,) = answer["tokens"]
    found = torch.tensor(answer["logprobs"][0])
    index = torch.tensor(tokens)[:, None]
    with deferring(reference, deferred, cold), reference.watching_routes() as gaps:
        logits = stepwise_logits(reference, prompt, tokens)
    routes = torch.stack([one[-1] for one in gaps]).view(len(tokens), LAYERS).amin(1)
    top = logits.topk(2)
    clear = top.values[:, 0] - top.values[:, 1] > gap
    if rounded:
        clear &= routes > ROUTE_GAP
    assert clear.sum() >= len(tokens) / (4 if rounded else 2), clear
    assert torch.equal(top.indices[clear, 0], index[clear, 0])
    late = (logits.log_softmax(-1).gather(-1, index)[:, 0] - found).abs()
    plain = stepwise_logits(reference, prompt, tokens).log_softmax(-1).gather(-1, index)[:, 0]
    middle = torch.median if rounded else torch.mean
    distance, without = middle(late), middle((plain - found).abs())
    print(f"deferral: {distance:.4f}, {without:.4f} from transformers with and without the rule")
    assert distance < near, late
    assert without > far * distance
