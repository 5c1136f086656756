"""The loss of a transformers model on a text, with its experts computed by kt-moe.

Everything but the experts runs in transformers in float32 on the CPU, so that differences are those
of the experts' method, or of deferral. Loss is in nats per token: windows that do not overlap, each
token but the first of its window predicted once.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .layers import load_layer

WINDOW = 2048  # maximum number of tokens in one context
# How far a layer's output may be from the model's own: any quantisation is far nearer, another
# function of the same weights is not.
_SAME_LAYER = 0.7
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]+)\.")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")


@dataclass(frozen=True)
class LossReport:
    """tokens: number of predicted tokens. before, after: loss in nats per token."""

    tokens: int
    before: float
    after: float

    @property
    def change(self) -> float:
        """Of the perplexity, relative."""
        return math.exp(self.after - self.before) - 1

    def __str__(self) -> str:
        return (
            f"loss {self.before:.5f} -> {self.after:.5f} nats per token, perplexity"
            f" {math.exp(self.before):.4f} -> {math.exp(self.after):.4f} ({self.change:+.2%}) on"
            f" {self.tokens} tokens"
        )


def loss_report(
    model_path: str | os.PathLike[str],
    packed: str | os.PathLike[str],
    method: str,
    text: str,
    *,
    window: int = WINDOW,
    tokens: int | None = None,
    threads: int | None = None,
    scale_search: bool = False,
) -> LossReport:
    """The model's loss with its own experts, and with those of `packed` in their place.

    packed, scale_search: as `weight_report` takes them. tokens: only so many of the text.

    Raises ImportError without transformers; ValueError for a text too short, or a model whose
    experts are not computed as here; and what the readers and transformers raise.
    """
    windows = windows_of(model_path, text, window, tokens)
    model = load_model(model_path)
    before = prefill_loss(model, windows)
    replace_experts(model, packed, method, threads=threads, scale_search=scale_search)
    return LossReport(sum(len(w) - 1 for w in windows), before, prefill_loss(model, windows))


def windows_of(
    model_path: str | os.PathLike[str], text: str, window: int, limit: int | None = None
) -> list[torch.Tensor]:
    """Tokens of the text, or the first `limit` of them, in windows. ValueError for too few."""
    tokenizer = _transformers().AutoTokenizer.from_pretrained(os.fspath(model_path))
    tokens = torch.tensor(tokenizer.encode(text), dtype=torch.int64, device="cpu")[:limit]
    windows = [w for w in tokens.split(window) if len(w) > 1]
    if not windows:
        raise ValueError(f"the text has {len(tokens)} tokens; at least 2 are needed for a loss")
    return windows


def load_model(path: str | os.PathLike[str]) -> Any:
    """The model in float32 on the CPU, with its own experts."""
    model = _transformers().AutoModelForCausalLM.from_pretrained(
        os.fspath(path), dtype=torch.float32, experts_implementation="eager"
    )
    return model.eval()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"the loss of a model needs transformers ({error}): pip install transformers"
        ) from None
    return transformers


class KTExperts(torch.nn.Module):
    """Replaces the `experts` module of a transformers MoE block."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.wrapper = layer

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return self.wrapper.forward(hidden, top_k_index, top_k_weights, None)


def replace_experts(model: Any, path: str | os.PathLike[str], method: str, **options: Any) -> Any:
    """Replaces the experts of every MoE block of a transformers model by layers from `path`.

    options: of `load_layer`. Raises ValueError for a model without experts modules, or one whose
    experts give something else.
    """
    config = model.config.get_text_config()
    top_k = next(
        (k for k in (getattr(config, n, None) for n in _TOP_K) if isinstance(k, int)), None
    )
    found = list(_experts_of(model))
    if not found or top_k is None:
        raise ValueError(
            f"{type(model).__name__}: no experts modules, or no {' or '.join(_TOP_K)} in its config"
        )
    while found:
        block, number, experts = found.pop(0)  # or all of the model's own would stay in memory
        layer = load_layer(
            path,
            number,
            method,
            top_k=top_k,
            swiglu_limit=getattr(experts, "limit", 0.0) or 0.0,
            swiglu_alpha=getattr(experts, "alpha", 0.0) or 0.0,
            **options,
        )
        ours = KTExperts(layer)
        if not options.get("max_deferred"):  # or some of the output would come later
            _check_same(number, experts, ours, config.hidden_size, top_k)
        block.experts = ours
    return model


def _experts_of(model: Any) -> Iterator[tuple[Any, int, Any]]:
    """(block, number of its layer, its experts) of every MoE block."""
    for name, block in model.named_modules():
        experts = getattr(block, "experts", None)
        match = _LAYER.search(name)
        if match and isinstance(experts, torch.nn.Module):
            yield block, int(match[1]), experts


@torch.no_grad()
def _check_same(number: int, theirs: Any, ours: KTExperts, hidden: int, top_k: int) -> None:
    """Both on a few tokens."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(8, hidden, generator=generator)
    scores = torch.rand(8, ours.wrapper._settings.num_experts, generator=generator)
    batch = x, scores.argsort(1)[:, :top_k], torch.full((8, top_k), 1 / top_k)
    name = type(theirs).__name__
    try:
        wanted = theirs(*batch)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"layer {number}: {name} is not called as other experts: {error}"
        ) from None
    distance = float((ours(*batch) - wanted).norm() / wanted.norm())
    if not distance < _SAME_LAYER:
        raise ValueError(
            f"layer {number}: the output is {distance:.0%} off that of {name}, which computes its"
            " experts in another way, or has another model's weights"
        )


def token_losses(logits: torch.Tensor, window: torch.Tensor) -> torch.Tensor:
    """Of all tokens but the first, float64."""
    return torch.nn.functional.cross_entropy(logits[:-1].double(), window[1:], reduction="none")


@torch.no_grad()
def prefill_loss(model: Any, windows: list[torch.Tensor]) -> float:
    """Mean loss with each window as one batch of tokens."""
    return torch.cat([token_losses(model(w[None]).logits[0], w) for w in windows]).mean().item()


@torch.no_grad()
def decode_loss(model: Any, windows: list[torch.Tensor]) -> float:
    """Mean loss with one token at a time, as deferral depends on the batch."""
    losses = []
    for window in windows:
        cache, rows = None, []
        for token in window:
            out = model(token.view(1, 1), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits[0, -1])
        losses.append(token_losses(torch.stack(rows), window))
    return torch.cat(losses).mean().item()
