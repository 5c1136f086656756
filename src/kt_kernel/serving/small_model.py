"""Makes a small random model of the class of another model, from that model's config.json.

The class, its routing and its kinds of layers stay; sizes and the number of layers shrink. Needs
transformers, which every engine installs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
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
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
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


def small_config(config: dict[str, Any]) -> dict[str, Any]:
    """The content of config.json for a small model of the same class.

    Raises:
        ValueError: the configuration has no number of layers, or is that of a multimodal model.
    """
    count = config.get("num_hidden_layers")
    if not isinstance(count, int) or "text_config" in config or "thinker_config" in config:
        raise ValueError(
            "its configuration is not that of a text model (num_hidden_layers); only text models "
            "can be checked"
        )
    layers = _layer_count(config, count)
    small: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, list) and len(value) == count:
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
    for value in config.values():
        if isinstance(value, list) and len(value) == count:
            kinds = {str(kind) for kind in value}
            first = {str(kind): i for i, kind in reversed(list(enumerate(value)))}
            needed = max(needed, *(first[kind] + 1 for kind in kinds))
    return min(needed, count, _LAYERS)


def write_small_model(config: dict[str, Any], folder: Path) -> None:
    """Writes two checkpoints of a small random model: ``model``, and ``control``, in which the
    weights of each layer's experts are moved on by one expert.

    config: what `small_config` returns.

    Raises:
        ValueError: transformers does not know the class, or the class keeps its experts in a way
            that is not known here.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers import __version__ as version

    torch.manual_seed(0)
    kind = config.get("model_type")
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    except Exception as error:  # transformers raises many types
        lines = str(error).splitlines() or [""]
        raise ValueError(
            f"transformers {version} cannot make a small model of model_type {kind!r}: "
            f"{type(error).__name__}: {lines[0]}"
        ) from error
    for name, tensor in model.state_dict().items():
        # Zeros would select the same experts for all tokens.
        if tensor.is_floating_point() and ("bias" in name or not tensor.any()):
            tensor.normal_(std=0.15)
    model.to(torch.bfloat16)
    _save(model, config, folder / "model")
    stacks = list(_stacks(model, config))
    if not stacks:
        raise ValueError(f"model class {type(model).__name__} of transformers has no experts")
    for stack in stacks:
        stack.data = stack.data.roll(1, 0)
    _save(model, config, folder / "control")


def _stacks(model: Any, config: dict[str, Any]) -> Iterator[torch.nn.Parameter]:
    """The weights of experts, [E, ...] each; biases, too."""
    experts = {
        value
        for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        if isinstance(value := config.get(name), int)
    }
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if any(tensor.dim() == 3 and len(tensor) in experts for tensor in own.values()):
            yield from (tensor for tensor in own.values() if len(tensor) in experts)


def _save(model: Any, config: dict[str, Any], path: Path) -> None:
    model.save_pretrained(path)
    file = path / "config.json"
    saved = json.loads(file.read_text())
    # Engines may read what transformers does not keep, and the name of the class in published
    # checkpoints may differ from transformers'.
    names = {"architectures": config.get("architectures")}
    file.write_text(json.dumps(config | saved | names, indent=2))
