"""Loads the model, checks that it can be tuned as the settings say, and wraps its experts."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from ..checkpoint import open_checkpoint
from ..checkpoint.base import Checkpoint
from ..serving.repository import Repository
from ..sft.adapters import FUSED, PER_EXPERT
from ..sft.families import is_fused, open_fused
from ..sft.methods import SftMethod, get_sft_method
from ..sft.wrap import layer_number, wrap_experts
from .blocks import Data
from .settings import Model, Settings


def check_model(settings: Settings) -> Any:
    """Checks the model by its configuration, before weights are read; returns the configuration.

    Raises:
        ValueError: no model; no supported experts; a method, a sequence length or attention modules
            that the model does not support.
        OSError: the hub has no such repository, or is not reachable.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model = settings.model
    if os.path.exists(model.path):
        if not os.path.isfile(os.path.join(model.path, "config.json")):
            raise ValueError(f"[model] path = {model.path}: not a model (config.json is missing)")
    elif not Repository.parse(model.path):
        raise ValueError(
            f"[model] path = {model.path}: no such folder, and not a repository's name (owner/name)"
        )
    config = AutoConfig.from_pretrained(model.path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    found = {name: module for name, module in empty.named_modules() if is_fused(module)}
    if not found:
        raise ValueError(f"[model] path = {model.path}: {type(empty).__name__} has no experts")
    checkpoint = open_checkpoint(model.weight_path) if model.weight_path else None
    for name, module in found.items():
        fused = open_fused(name, module, model.allow_untested)
        experts, hidden, inter = fused.sizes
        method = _check_method(model, hidden, inter)
        if model.gpu_experts > experts:
            raise ValueError(
                f"[model] gpu_experts = {model.gpu_experts}; accepted: at most the model's "
                f"{experts} experts"
            )
        if checkpoint is not None:
            _check_stored(checkpoint, layer_number(name), fused.sizes, method)
        if settings.output.layout == PER_EXPERT and not fused.layout.single:
            raise ValueError(
                f'[output] layout = "{PER_EXPERT}": {type(empty).__name__} has no checkpoints with '
                f'experts of their own; accepted: "{FUSED}"'
            )
    _check_modules(settings, empty)
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and settings.data.sequence_length > longest:
        raise ValueError(
            f"[data] sequence_length = {settings.data.sequence_length}; accepted: at most the "
            f"model's {longest} positions"
        )
    return config


def check_vocabulary(data: Data, config: Any) -> None:
    """Raises ValueError for tokens that the model does not have."""
    size = config.get_text_config().vocab_size
    largest = max(int(blocks.ids.max()) for blocks in (data.train, data.held_out))
    if largest >= size:
        raise ValueError(
            f"the tokenizer gives token {largest}, the model has {size}; they do not fit together"
        )


def _check_method(model: Model, hidden: int, inter: int) -> SftMethod:
    method = get_sft_method(model.method, model.group_size, True, hidden, inter)
    if method.base.quantised and not model.weight_path:
        raise ValueError(
            f"[model] method = {model.method} keeps quantised weights; give weight_path, where "
            "they are"
        )
    if model.weight_path and method.reads_model:
        raise ValueError(
            f"[model] weight_path is not read by method = {model.method}, which uses the model's "
            "own weights"
        )
    unit = method.base.column_unit
    for name, size in (("hidden_size", hidden), ("moe_intermediate_size", inter)):
        if size % unit:
            raise ValueError(
                f"[model] method = {model.method} needs multiples of {unit}; the model's {name} is "
                f"{size}"
            )
    return method


def _check_stored(
    checkpoint: Checkpoint, layer: int, sizes: tuple[int, int, int], method: SftMethod
) -> None:
    """Whether ``weight_path`` has this layer's experts, for this method."""
    place = f"[model] weight_path = {checkpoint.path}: layer {layer}"
    found = tuple(checkpoint.sizes(layer))
    if found != sizes:
        raise ValueError(f"{place} has (experts, H, I) = {found}, the model has {sizes}")
    try:
        with checkpoint.each_expert(layer, *sizes, (), method.reads_as):
            pass
    except ValueError as error:
        raise ValueError(f"{place}: method = {method.name}: {error}") from None


def _check_modules(settings: Settings, model: nn.Module) -> None:
    for wanted in settings.lora.attention_modules:
        names = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        }
        if wanted not in names:
            raise ValueError(
                f"[lora] attention_modules has {wanted!r}; accepted, of this model: "
                f"{', '.join(sorted(names))}"
            )


def load_model(settings: Settings) -> nn.Module:
    """The model with wrapped experts, on the CPU. Initial values of LoRA are drawn from torch's
    random numbers, see ``seed``. Raises what transformers and `wrap_experts` raise."""
    from transformers import AutoModelForCausalLM

    given, lora = settings.model, settings.lora
    dtype = getattr(torch, given.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(given.path, dtype=dtype)
    if hasattr(model.config, "output_router_logits"):
        model.config.output_router_logits = False  # the router is not trained, nor its balance
    if lora.attention_modules:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model,
            LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=list(lora.attention_modules),
                task_type="CAUSAL_LM",
            ),
        )
    wrap_experts(
        model,
        sft_method=given.method,
        from_checkpoint=bool(given.weight_path),
        weight_path=given.weight_path or None,
        group_size=given.group_size,
        cpuinfer_threads=given.cpuinfer_threads or None,
        num_gpu_experts=given.gpu_experts,
        lora_rank=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        allow_untested=given.allow_untested,
    )
    return model
