"""The measured MoE layers, and the experts that their batches visit."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Shape(NamedTuple):
    """E experts, hidden size H, intermediate size I, k experts per token."""

    name: str
    experts: int
    hidden: int
    inter: int
    top_k: int

    @property
    def weights(self) -> int:
        """The number of weights of one expert."""
        return 3 * self.hidden * self.inter


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b-a3b", 128, 2048, 768, 8),
        Shape("deepseek-v3", 256, 7168, 2048, 8),
        Shape("mixtral", 8, 4096, 14336, 2),
        Shape("gpt-oss-120b", 128, 2880, 2880, 4),
        Shape("kimi-k2", 384, 7168, 2048, 8),
    )
}
SEED = 0
TOKENS = tuple(2**i for i in range(12))


def parse_shape(text: str) -> Shape:
    """A name in SHAPES, or "E,H,I,k"."""
    if text in SHAPES:
        return SHAPES[text]
    try:
        experts, hidden, inter, top_k = map(int, text.split(","))
    except ValueError:
        raise ValueError(f"shape {text!r}: one of {', '.join(SHAPES)}, or E,H,I,k") from None
    return Shape(text, experts, hidden, inter, top_k)


def inputs(shape: Shape, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x bf16 [T, H] and router weights [T, k], the same in every process."""
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, shape.hidden, generator=random).to(torch.bfloat16)
    return x, torch.rand(tokens, shape.top_k, generator=random)


def check_ids(shape: Shape, tokens: int) -> torch.Tensor:
    """Expert ids [T, k] of a batch whose output is compared between processes."""
    return (torch.arange(tokens * shape.top_k) % shape.experts).view(tokens, -1)


class Routing:
    """The batches of one run: the order of layers, and the experts that tokens choose.

    Layers take turns. A batch that needs fewer experts than a layer has takes the next ones in a
    fixed order, so that an expert is used again only after all other experts of all layers. A
    larger batch draws experts uniformly, as a balanced router would. The same seed gives the same
    batches.
    """

    def __init__(self, shape: Shape, layers: int, seed: int = 0) -> None:
        self.shape, self.layers = shape, layers
        self._random = torch.Generator().manual_seed(seed)
        self._order = torch.randperm(shape.experts, generator=self._random)
        self._next = [0] * layers  # position in the order, per layer
        self._layer = 0
        self._draws: dict[int, list[torch.Tensor]] = {}

    def draw(self, tokens: int) -> tuple[int, torch.Tensor]:
        """(layer, expert ids int64 [T, k]) of the next batch."""
        layer, self._layer = self._layer, (self._layer + 1) % self.layers
        count = tokens * self.shape.top_k
        if count < self.shape.experts:
            places = (self._next[layer] + torch.arange(count)) % self.shape.experts
            self._next[layer] = (self._next[layer] + count) % self.shape.experts
            return layer, self._order[places].view(tokens, -1)
        if tokens not in self._draws:
            self._draws[tokens] = [self._uniform(tokens) for _ in range(2)]
        self._draws[tokens].append(self._draws[tokens].pop(0))
        return layer, self._draws[tokens][0]

    def touched(self, tokens: int) -> float:
        """The number of experts that a batch reads, averaged over the draws."""
        count = tokens * self.shape.top_k
        if count < self.shape.experts:
            return count
        self.draw(tokens)
        return sum(len(ids.unique()) for ids in self._draws[tokens]) / len(self._draws[tokens])

    def _uniform(self, tokens: int) -> torch.Tensor:
        keys = torch.rand(tokens, self.shape.experts, generator=self._random)
        return keys.argsort(-1)[:, : self.shape.top_k].contiguous()
