"""`wrap_experts`: the experts of a transformers model, replaced by ones that train on the CPU."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..experts import KTMoEWrapper
from .base import BaseSFTMoEWrapper
from .config import KTConfig, Path, get_sft_weight_path
from .families import Fused, is_fused, open_fused
from .modules import LoraExperts, module_class

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def wrap_experts(
    model: nn.Module,
    config: KTConfig | None = None,
    *,
    from_checkpoint: bool = False,
    adapter_name: str = "default",
    lora_dtype: torch.dtype = torch.float32,
    lora_device: torch.device | str | None = None,
    allow_untested: bool = False,
    **settings: Any,
) -> dict[str, LoraExperts]:
    """Replaces, in place, the experts of every MoE layer by modules with LoRA, computed on the CPU.

    The model's other parameters are frozen, as PEFT does; unfreeze those that are to be trained.
    For adapters on other layers call ``peft.get_peft_model`` before: its parameters stay as they
    are.

    Args:
        model: a transformers model whose experts are 3-D parameters, as those of transformers 5
            are; or a ``PeftModel`` around one. The base weights of each layer are packed, then the
            model's own are released, layer by layer.
        config: settings of all layers.
        from_checkpoint: read the base weights from the path of `get_sft_weight_path` instead; the
            model's own are not read and may be on the meta device.
        adapter_name: of the parameters, see `LoraExperts`; that of the ``PeftModel``.
        lora_dtype: of the LoRA parameters.
        lora_device: where the LoRA parameters stay, whatever the model is moved to. None: they are
            made on the CPU and move with the model.
        allow_untested: accept classes of experts that were not tested.
        settings: replace fields of ``config`` or of its defaults.

    Returns:
        The new modules by their names in the model.

    Raises:
        ValueError: the model has no such experts, or one that is not supported; what
            ``KTMoEWrapper`` raises. Layers before it are replaced already then.
        RuntimeError: ``from_checkpoint`` and no path is set.
        TypeError: a setting that does not exist.
    """
    config = dataclasses.replace(config or KTConfig(), **settings)
    if config.full_weight_grad:
        raise ValueError(
            "full_weight_grad=True: modules train LoRA only; KTMoEWrapper's backward returns "
            "gradients of the base weights"
        )
    found = dict(_fused_experts(model))
    if not found:
        raise ValueError(
            f"{type(model).__name__}: no module with experts in 3-D parameters gate_up_proj and "
            "down_proj, as transformers 5 has them"
        )
    top_k = _experts_per_token(model)
    opened = {path: open_fused(path, module, allow_untested) for path, module in found.items()}
    del found
    path = get_sft_weight_path(config) if from_checkpoint else None
    make = module_class()
    _freeze(model)
    modules = {}
    for name in list(opened):
        fused = opened.pop(name)
        wrapper = _make_layer(name, fused, top_k, path, config)
        module = make(
            wrapper,
            layout=fused.layout,
            adapter_name=adapter_name,
            dtype=lora_dtype,
            device="cpu" if lora_device is None else lora_device,
            pinned=lora_device is not None,
        )
        module.train(fused.module.training)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)
        modules[name] = module
    return modules


def wrapped_experts(model: nn.Module) -> dict[str, LoraExperts]:
    """The modules that `wrap_experts` made, by their names in the model.

    Raises:
        ValueError: there is none.
    """
    modules = {n: module for n, module in model.named_modules() if isinstance(module, LoraExperts)}
    if not modules:
        raise ValueError(f"{type(model).__name__}: no wrapped experts; call wrap_experts first")
    return modules


def _freeze(model: nn.Module) -> None:
    if not hasattr(model, "peft_config"):  # PEFT has done it
        model.requires_grad_(False)


def _fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if is_fused(module):
            yield name, module


def layer_number(name: str) -> int:
    """The layer's number in a module's name.

    Raises:
        ValueError: there is none.
    """
    found = _LAYER.search(f"{name}.")
    if found is None:
        raise ValueError(f"{name}: not inside a list of layers (layers.<number>.)")
    return int(found[1])


def _experts_per_token(model: nn.Module) -> int:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    top_k = getattr(config, "num_experts_per_tok", None)
    if top_k is None:
        raise ValueError(f"{type(model).__name__}: config has no num_experts_per_tok")
    return top_k


def _make_layer(
    name: str, fused: Fused, top_k: int, path: Path | None, config: KTConfig
) -> BaseSFTMoEWrapper:
    experts, hidden, inter = fused.sizes
    wrapper: BaseSFTMoEWrapper = KTMoEWrapper(
        layer_idx=layer_number(name),
        num_experts=experts,
        num_experts_per_tok=top_k,
        hidden_size=hidden,
        moe_intermediate_size=inter,
        weight_path=path,
        swiglu_limit=fused.swiglu_limit,
        swiglu_alpha=fused.swiglu_alpha,
        **config.wrapper_arguments(),
    )
    order = torch.arange(experts, device="cpu")
    if path is not None:
        wrapper.load_weights(order)
        return wrapper
    wrapper.load_weights_from_tensors(**fused.weights(), physical_to_logical_map_cpu=order)
    return wrapper
