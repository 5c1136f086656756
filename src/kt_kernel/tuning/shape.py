"""The sizes of a model that its speed depends on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ..checkpoint import Checkpoint
from ..moe.settings import MAX_DIMENSION, MAX_EXPERTS
from ..runtime.nested import at, text_path
from ..serving.model_config import (
    described_layers,
    expert_sizes,
    has_gate,
    layer_kinds,
    num_experts,
    number_of_layers,
    size_of,
)

# Names of routed experts in checkpoints, not of shared ones.
_ROUTED = re.compile(
    r"(^|\.)experts\.|_exps\.|\.block_sparse_moe\.(input|output)_linear\."
    r"|\.moe\.(gate|up|down)_proj\."
)
_LAYER = re.compile(r"(.*?\b(?:layers|blk))\.([0-9]{1,9})\.")  # its stack and number
# Kinds of layers, in configurations. Layers of kinds that are not known count as full attention: to
# take too much of the GPU for their KV cache is safer than to take none.
_WITHIN_A_WINDOW = "sliding_attention", "chunked_attention", "hybrid_sliding"
_WITHOUT_KV_CACHE = "linear_attention", "mamba", "mamba2", "conv", "moe", "mlp"
_MOST_LAYERS = 10_000  # far above any model's; a damaged configuration may have more
_TYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model.

    Attributes:
        name: of the model, as given by the user.
        layers: all decoder layers.
        moe_layers: numbers of the layers with experts.
        experts, top_k: per layer, and of each token.
        hidden, inter: of an expert.
        value_bytes: of a 16- or 32-bit weight.
        rest_bytes: weights of everything but the routed experts.
        layer_bytes: of these, the ones of all layers.
        head_bytes: of these, the output matrix.
        attention: of a layer: heads times the mean size of their keys and values.
        reach: for each layer, to how many tokens before it a token attends: infinity, those of a
            sliding window, or 0 in layers with linear attention or none.
        kv_bytes: of the KV cache, for each token of a context.
        gated: whether experts have a gate.
    """

    name: str
    layers: int
    moe_layers: tuple[int, ...]
    experts: int
    top_k: int
    hidden: int
    inter: int
    value_bytes: int
    rest_bytes: int
    layer_bytes: int
    head_bytes: int
    attention: float
    reach: tuple[float, ...]
    kv_bytes: int
    gated: bool = True

    @property
    def expert_weights(self) -> int:
        """Of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.inter


def as_config(content: dict[str, Any], changes: Mapping[str, Any] | None = None) -> SimpleNamespace:
    """The content of config.json as the object that readers of configurations expect: of a
    multimodal model, its language model, and the class of the whole one. changes: by the user, as
    engines apply them."""
    content = _changed(content, text_path(content), changes or {})
    whole = {"architectures": content.get("architectures")}
    return SimpleNamespace(**content | at(content, text_path(content)) | whole)


def _changed(
    content: dict[str, Any], path: tuple[str, ...], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Changes replace values, except for the configuration of a part, which they change. path:
    leads to that of the text model."""
    found = {**content, **changes}
    if path and isinstance(inner := changes.get(path[0]), dict):
        found[path[0]] = _changed(content[path[0]], path[1:], inner)
    return found


def shape_of(name: str, config: Any, checkpoint: Checkpoint | None = None) -> Shape:
    """The sizes of a model.

    Args:
        config: see `as_config`.
        checkpoint: its files, if they are there; otherwise the weights besides the experts are
            estimated from the configuration.

    Raises:
        ValueError: the model has no experts, or the configuration lacks a size.
    """
    experts = num_experts(config)
    hidden, inter = expert_sizes(config)
    layers, top_k = number_of_layers(config), _top_k(config)
    for what, value, most in (
        ("num_hidden_layers", layers, _MOST_LAYERS),
        ("number of experts", experts, MAX_EXPERTS),
        ("num_experts_per_tok", top_k, experts),
        ("hidden_size", hidden, MAX_DIMENSION),
        ("moe_intermediate_size", inter, MAX_DIMENSION),
    ):
        if value is None:
            raise ValueError(f"{name}: its configuration has no {what}")
        if value > most:
            raise ValueError(f"{name}: its configuration has {what} {value}; accepted: 1 to {most}")
    assert layers and top_k and hidden and inter  # checked above
    moe_layers = described_layers(config)
    if moe_layers is None and checkpoint is not None:
        moe_layers = [layer for layer in checkpoint.layers() if layer < layers]
    moe_layers = list(range(layers)) if moe_layers is None else moe_layers
    if not moe_layers:
        raise ValueError(f"{name}: no layer has experts")
    value_bytes = _TYPES.get(str(getattr(config, "dtype", None) or ""), 2)
    heads = size_of(config, "num_attention_heads") or 1
    width = size_of(config, "hidden_size") or hidden
    head = size_of(config, "head_dim") or size_of(config, "v_head_dim") or width // heads
    reach = _reach(config, layers)
    embedding = (size_of(config, "vocab_size") or 0) * width * value_bytes
    tied = bool(getattr(config, "tie_word_embeddings", False))
    if checkpoint is None:
        inside = _estimated(config, layers - len(moe_layers), layers, heads * head, value_bytes)
        rest = inside + (1 if tied else 2) * embedding
    else:
        rest = _rest_bytes(checkpoint, layers)
        inside = max(rest - (1 if tied else 2) * embedding, 0)
    return Shape(
        name=name,
        layers=layers,
        moe_layers=tuple(moe_layers),
        experts=experts,
        top_k=top_k,
        hidden=hidden,
        inter=inter,
        value_bytes=value_bytes,
        rest_bytes=rest,
        layer_bytes=inside,
        head_bytes=embedding,
        attention=heads * (_key_size(config, head) + head) / 2,
        reach=reach,
        kv_bytes=_kv_bytes(config, sum(map(bool, reach)), heads, head, value_bytes),
        gated=has_gate(config),
    )


def _rest_bytes(checkpoint: Checkpoint, layers: int) -> int:
    """Of all weights but the routed experts, without layers that follow the model's: those of
    multi-token prediction, or that a change of the configuration leaves out."""
    tensors = checkpoint.tensors.values()
    routed = [info.name for info in tensors if _ROUTED.search(info.name)]
    stacks = {found[1] for found in map(_LAYER.match, routed) if found}

    def served(name: str) -> bool:
        found = _LAYER.match(name)
        return not (found and found[1] in stacks and int(found[2]) >= layers)

    without = {*routed}
    return sum(
        info.end - info.begin for info in tensors if info.name not in without and served(info.name)
    )


def _top_k(config: Any) -> int | None:
    for name in ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"):
        if count := size_of(config, name):
            return count
    return None


def _reach(config: Any, layers: int) -> tuple[float, ...]:
    """See `Shape`. A configuration that does not say has full attention."""
    kinds = getattr(config, "layer_types", None) or layer_kinds(config)
    if isinstance(kinds, list) and len(kinds) >= layers:
        window = size_of(config, "sliding_window") or size_of(config, "attention_chunk_size")
        reach = dict.fromkeys(_WITHOUT_KV_CACHE, 0.0)
        reach |= dict.fromkeys(_WITHIN_A_WINDOW, float(window or math.inf))
        return tuple(reach.get(kind, math.inf) for kind in kinds[:layers])
    every = size_of(config, "full_attention_interval") or 1
    return tuple(0.0 if (layer + 1) % every else math.inf for layer in range(layers))


def _key_size(config: Any, head: int) -> int:
    """Of a head's keys. Those of multi-head latent attention have two parts."""
    parts = size_of(config, "qk_nope_head_dim"), size_of(config, "qk_rope_head_dim")
    return sum(parts) if all(parts) else head  # type: ignore[arg-type]


def _kv_bytes(config: Any, layers: int, heads: int, head: int, value_bytes: int) -> int:
    """Of multi-head latent attention, which keeps one compressed vector per token, or of heads of
    keys and values."""
    latent = size_of(config, "kv_lora_rank")
    if latent:
        return layers * (latent + (size_of(config, "qk_rope_head_dim") or 0)) * value_bytes
    pairs = size_of(config, "num_key_value_heads") or heads
    return layers * 2 * pairs * head * value_bytes


def _estimated(config: Any, dense: int, layers: int, attention: int, value_bytes: int) -> int:
    """Weights of attention, dense layers and shared experts."""
    width = size_of(config, "hidden_size") or 0
    pairs = size_of(config, "num_key_value_heads") or 1
    heads = size_of(config, "num_attention_heads") or 1
    own = 2 * width * attention + 2 * width * attention * pairs // heads
    matrices = 3 if has_gate(config) else 2
    mlp = matrices * width * (size_of(config, "intermediate_size") or 4 * width)
    shared = size_of(config, "shared_expert_intermediate_size") or 0
    shared += (size_of(config, "n_shared_experts") or 0) * (
        size_of(config, "moe_intermediate_size") or 0
    )
    values = layers * own + dense * mlp + (layers - dense) * matrices * width * shared
    return math.ceil(values * value_bytes)
