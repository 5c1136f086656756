"""A model with an expert that overflows float16 on every token, and texts that never use it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_model import TOP_K, VOCABULARY, Greedy, Reference, make

_LAYER = 1
HOT = 2  # hot experts: expert 0, which overflows, and another one


@dataclass(frozen=True)
class Overflowing:
    """The checkpoint, prompts, and the reference's text for each prompt in float32."""

    path: Path
    prompts: list[list[int]]
    greedy: Greedy


@torch.no_grad()
def overflowing(folder: Path, tries: int = 48, count: int = 4) -> Overflowing:
    """Makes the model in a new folder. A token that is routed to expert 0 in any layer is lost, in
    any engine. Of ``tries`` random prompts, selects the ``count`` clearest ones whose texts have no
    such token."""
    reference = Reference(make(folder / "made", seed=5))
    module = reference.model.model.layers[_LAYER].mlp
    gate = module.gate.weight.data
    gate[0] = gate[1:].mean(0)  # rarely among the best
    module.experts.gate_up_proj.data[0] *= 300
    path = folder / "overflowing"
    reference.model.save_pretrained(path)

    generator = torch.Generator().manual_seed(2)
    prompts = torch.randint(3, VOCABULARY, (tries, 6), generator=generator).tolist()
    greedy = reference.greedy(prompts)
    chosen: list[torch.Tensor] = []
    hook = module.gate.register_forward_hook(
        lambda gate, x, out: chosen.append(out[0].topk(TOP_K).indices)
    )
    texts = [prompt + more for prompt, more in zip(prompts, greedy.tokens, strict=True)]
    reference.model(torch.tensor(texts), use_cache=False)
    hook.remove()
    avoided = (chosen[0].view(tries, -1) != 0).all(1).nonzero()[:, 0].tolist()
    best = sorted(avoided, key=lambda i: -min(greedy.gaps[i]))[:count]
    assert len(best) == count, f"only {len(best)} texts"
    return Overflowing(
        path,
        [prompts[i] for i in best],
        Greedy([greedy.tokens[i] for i in best], [greedy.gaps[i] for i in best]),
    )
