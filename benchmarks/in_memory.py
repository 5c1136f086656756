"""A model with random weights, whose experts come from memory through the loader of an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

import torch
from shapes import Shape
from synthetic import SCALE, config

VOCABULARY = 4096
LOADERS = {  # and their methods that yield a model's tensors
    "vllm": (
        "vllm.model_executor.model_loader.default_loader:DefaultModelLoader",
        "get_all_weights",
    ),
    "sglang": ("sglang.srt.model_loader.loader:DefaultModelLoader", "_get_all_weights"),
}


def weights_without_experts(
    shape: Shape, layers: int, attention: float = SCALE
) -> dict[str, torch.Tensor]:
    """attention: scale of what a layer's attention adds; with 0, a token's experts depend on the
    token alone."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = torch.Generator(device).manual_seed(0)

    def weight(*size: int, scale: float = SCALE) -> torch.Tensor:
        values = torch.randn(size, generator=made, device=device, dtype=torch.bfloat16)
        return (values * scale).cpu()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    c, h = config(shape, layers, VOCABULARY), shape.hidden
    heads, pairs = c["num_attention_heads"] * 128, c["num_key_value_heads"] * 128
    tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY, h),
        "lm_head.weight": weight(VOCABULARY, h),
        "model.norm.weight": ones(h),
    }
    for layer in range(layers):
        place = f"model.layers.{layer}"
        tensors |= {
            f"{place}.input_layernorm.weight": ones(h),
            f"{place}.post_attention_layernorm.weight": ones(h),
            f"{place}.self_attn.q_norm.weight": ones(128),
            f"{place}.self_attn.k_norm.weight": ones(128),
            f"{place}.self_attn.q_proj.weight": weight(heads, h),
            f"{place}.self_attn.k_proj.weight": weight(pairs, h),
            f"{place}.self_attn.v_proj.weight": weight(pairs, h),
            f"{place}.self_attn.o_proj.weight": weight(h, heads, scale=attention),
            f"{place}.mlp.gate.weight": weight(shape.experts, h),
        }
    return tensors


def serve_experts_from_memory(
    engine: str, shape: Shape, layers: int, experts: int | None = None
) -> None:
    """The loader of the engine in this process also delivers the first `experts` experts of each
    layer, or all, with the same weights."""
    place, method = LOADERS[engine]
    loader = resolve_name(place)
    made = torch.Generator().manual_seed(1)
    sizes = {
        "gate_proj": (shape.inter, shape.hidden),
        "up_proj": (shape.inter, shape.hidden),
        "down_proj": (shape.hidden, shape.inter),
    }
    matrices = {
        name: (torch.randn(size, generator=made) * SCALE).bfloat16() for name, size in sizes.items()
    }
    original = getattr(loader, method)

    def get(*given: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield from original(*given)
        for layer in range(layers):
            for expert in range(experts or shape.experts):
                for name, matrix in matrices.items():
                    yield f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", matrix

    setattr(loader, method, get)
