"""Makes a small random model of the class of another model, from that model's config.json.

The class, its routing and its kinds of layers stay; sizes and the number of layers shrink. Needs
transformers, which every engine installs. Of a multimodal model, `small_multimodal` has the parts
other than the text model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ..runtime.nested import NUMBERS_OF_EXPERTS, at, text_path
from .model_config import KINDS_AS_TEXT, number_of_layers
from .small_multimodal import around

VOCABULARY = 512
_SPECIAL = 32  # more tokens of multimodal models, for images and the like
_LAYERS = 12  # at most
# Sizes that shrink to at most these values, by their names in config.json.
_AT_MOST = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 128,
    "ffn_hidden_size": 128,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "shared_intermediate_size": 128,
    "share_expert_dim": 128,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "moe_top_k": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    "num_nextn_predict_layers": 0,
    "mtp_num_hidden_layers": 0,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Every how many layers something occurs.
_STEPS = (
    "decoder_sparse_step",
    "full_attention_interval",
    "interleave_moe_layer_step",
    "moe_layer_freq",
    "moe_layer_interval",
    "sliding_window_pattern",
)


# Parts of names that transformers writes for a model type, and those in published checkpoints.
_PUBLISHED = {
    "kimi_k25": {
        "language_model.model.blocks.": "language_model.model.layers.",
        "model.mm_projector.": "mm_projector.",
        "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
    }
}


class UnknownToTransformers(ValueError):
    """transformers cannot make a model of this configuration."""


def small_config(config: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json for a small model of the same class.

    Raises:
        ValueError: the configuration of the text model has no number of layers.
    """
    path = text_path(config)
    text = _small_text(at(config, path))
    if not path:
        return text
    text["vocab_size"] = VOCABULARY + _SPECIAL
    return around(config, path, text, VOCABULARY)


def text_layers(small: dict[str, Any]) -> int:
    """The number of layers of the text model."""
    layers: int = at(small, text_path(small))["num_hidden_layers"]
    return layers


def _small_text(config: dict[str, Any]) -> dict[str, Any]:
    count = number_of_layers(SimpleNamespace(**config))
    if count is None:
        raise ValueError(
            "its configuration has no number of layers (num_hidden_layers), neither for itself nor "
            "for a text model inside it (text_config)"
        )
    layers = _layer_count(config, count)
    small: dict[str, Any] = {}
    for name, value in config.items():
        if _per_layer(name, value, count):
            value = value[:layers]
        elif isinstance(value, int) and not isinstance(value, bool) and name in _AT_MOST:
            value = min(value, _AT_MOST[name])
        small[name] = value
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(groups, int):
        small["num_key_value_heads"] = small["num_attention_heads"] if groups == heads else 2
    if isinstance(config.get("mlp_only_layers"), list):
        small["mlp_only_layers"] = [i for i in config["mlp_only_layers"] if i < layers]
    if "moe_layer_end_index" in config:
        small["moe_layer_end_index"] = layers - 1
    for name in ("quantization_config", "compression_config", "auto_map", "torch_dtype"):
        small.pop(name, None)
    return (
        small
        | _TOKENS
        | {
            "num_hidden_layers": layers,
            "initializer_range": 0.15,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }
    )


def _layer_count(config: dict[str, Any], count: int) -> int:
    """The fewest layers that include every kind of layer, at least two with experts."""
    needed = 1 + min(config.get("first_k_dense_replace") or 1, 1) + 1
    steps = [config.get(name) for name in _STEPS]
    needed = max(needed, *(step for step in steps if isinstance(step, int)), 0)
    listed = re.findall(r"\d+", str(config.get("moe_layers_enum") or ""))  # those with experts
    needed = max(needed, *(int(number) + 1 for number in listed[:2]), 0)
    for name, value in config.items():
        if _per_layer(name, value, count):
            kinds = {str(kind) for kind in value}
            first = {str(kind): i for i, kind in reversed(list(enumerate(value)))}
            needed = max(needed, *(first[kind] + 1 for kind in kinds))
    return min(needed, count, _LAYERS)


def _per_layer(name: str, value: Any, count: int) -> bool:
    """Whether a value of the configuration has an entry for each layer."""
    return (isinstance(value, list) or name == KINDS_AS_TEXT) and len(value) == count


def write_small_model(config: dict[str, Any], folder: Path) -> None:
    """Writes two checkpoints of a small random model: ``model``, and ``control``, in which the
    weights of each layer's experts are moved on by one expert.

    config: what `small_config` returns.

    Raises:
        UnknownToTransformers: transformers does not know the class.
        ValueError: the class keeps its experts in a way that is not known here.
    """
    from transformers import __version__ as version

    torch.manual_seed(0)
    kind = config.get("model_type")
    try:
        model = _model_of(config)
    except Exception as error:  # transformers raises many types
        lines = str(error).splitlines() or [""]
        raise UnknownToTransformers(
            f"transformers {version} cannot make a small model of model_type {kind!r}: "
            f"{type(error).__name__}: {lines[0]}"
        ) from error
    for name, tensor in model.state_dict().items():
        # Zeros would select the same experts for all tokens.
        if tensor.is_floating_point() and ("bias" in name or not tensor.any()):
            tensor.normal_(std=0.15)
    path = text_path(config)
    if path:  # what stands for images and the like must not follow in a text
        text = getattr(model, "thinker", model)
        text.get_output_embeddings().weight.data[VOCABULARY:] = 0
    model.to(torch.bfloat16)
    _save(model, config, folder / "model")
    stacks = list(_stacks(model, at(config, path)))
    if not stacks:
        raise ValueError(f"model class {type(model).__name__} of transformers has no experts")
    for stack in stacks:
        stack.data = stack.data.roll(1, 0)
    _save(model, config, folder / "control")


def _model_of(config: dict[str, Any]) -> Any:
    """A model of the class that the configuration names, or of the one that transformers has for
    its model type."""
    import transformers

    settings = transformers.AutoConfig.for_model(**config)
    for name in config.get("architectures") or []:
        if isinstance(made := getattr(transformers, name, None), type):
            return made(settings)
    kind = "ImageTextToText" if text_path(config) else "CausalLM"
    return getattr(transformers, f"AutoModelFor{kind}").from_config(settings)


def _stacks(model: Any, config: dict[str, Any]) -> Iterator[torch.nn.Parameter]:
    """The weights of experts, [E, ...] each; biases, too."""
    experts = {value for name in NUMBERS_OF_EXPERTS if isinstance(value := config.get(name), int)}
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if any(tensor.dim() == 3 and len(tensor) in experts for tensor in own.values()):
            yield from (tensor for tensor in own.values() if len(tensor) in experts)


def _save(model: Any, config: dict[str, Any], path: Path) -> None:
    model.save_pretrained(path)
    renamed = _PUBLISHED.get(config.get("model_type", ""), {})
    _rewrite(path / "model.safetensors", _turned(config), renamed)
    file = path / "config.json"
    saved = json.loads(file.read_text())
    # Engines may read what transformers does not keep, and the name of the class in published
    # checkpoints may differ from transformers'.
    names = {"architectures": config.get("architectures")}
    file.write_text(json.dumps(_merged(config, saved) | names, indent=2))


def _merged(config: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """saved, with what it lacks of config, also in nested configurations."""
    both = config | saved
    for name, value in saved.items():
        if name.endswith("_config") and isinstance(value, dict):
            inner = config.get(name)
            both[name] = _merged(inner, value) if isinstance(inner, dict) else value
    return both


def _turned(config: dict[str, Any]) -> list[str]:
    """Patterns of the stacks whose matrices published checkpoints have transposed. transformers
    knows them, and transposes when it reads, but not when it writes a new model."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:  # versions before 5, which keep the published form
        return []
    found = []
    for converter in get_checkpoint_conversion_mapping(config.get("model_type", "")) or []:
        steps = [type(step).__name__ for step in getattr(converter, "operations", None) or []]
        if steps == ["Transpose"]:
            found += [str(pattern) for pattern in converter.source_patterns]
    return found


def _rewrite(file: Path, turned: list[str], renamed: dict[str, str]) -> None:
    """Transposes the matrices whose names match a pattern of ``turned``, and replaces parts of
    names."""
    from safetensors.torch import load_file, save_file

    if not turned and not renamed:
        return
    tensors = {}
    for name, tensor in load_file(file).items():
        if any(re.search(pattern, name) for pattern in turned):
            tensor = tensor.transpose(-1, -2).contiguous()
        for written, published in renamed.items():
            name = name.replace(written, published)
        tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
