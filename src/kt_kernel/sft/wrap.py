"""`wrap_experts`: the experts of a transformers model, replaced by ones that train on the CPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..experts import KTMoEWrapper
from .base import BaseSFTMoEWrapper
from .batch import check_device
from .config import KTConfig, Path, get_sft_weight_path
from .families import Fused, is_fused, open_fused
from .hot import HotExperts
from .lora import need_float_dtype
from .modules import LoraExperts, check_adapter_name, check_nonfinite
from .peft_layer import check_peft_model, module_class, refuse_merging
from .settings import need_bool

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def wrap_experts(
    model: nn.Module,
    config: KTConfig | None = None,
    *,
    from_checkpoint: bool = False,
    adapter_name: str = "default",
    lora_dtype: torch.dtype = torch.float32,
    lora_device: torch.device | str | None = None,
    nonfinite: str = "error",
    allow_untested: bool = False,
    gpu_experts_masks: torch.Tensor | None = None,
    **settings: Any,
) -> dict[str, LoraExperts]:
    """Replaces, in place, the experts of every MoE layer by modules with LoRA, computed on the CPU.

    With ``full_weight_grad=True`` the experts' base weights are trained as well, and packed again
    after each optimizer step. A method ``_SkipLoRA`` then trains them alone.

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
        nonfinite: "error" or "propagate", which fp16 with a gradient scaler needs; see
            `LoraExperts`.
        allow_untested: accept classes of experts that were not tested.
        gpu_experts_masks: bool [L, E], one row for each MoE layer, as
            `kt_kernel.generate_gpu_experts_masks` makes them. The experts with True are computed
            with torch on the device of the model, where they move with it. None: the first
            ``num_gpu_experts`` of each layer, by default none.
        settings: replace fields of ``config`` or of its defaults.

    Returns:
        The new modules by their names in the model.

    Raises:
        TypeError, ValueError: an argument is wrong; the model has no such experts, or one that is
            not supported; its weights have another shape or dtype, or are not finite.
        RuntimeError: ``from_checkpoint`` and no path is set, or a device that is not there.
        FileNotFoundError, KeyError, ValueError: ``from_checkpoint``, and a layer's weights are
            missing or cannot be packed.

    After an error the model is as it was, except where weights of layers were released already:
    after a MemoryError, and with ``from_checkpoint`` for experts that are not on the meta device.
    Those layers stay replaced.
    """
    _check_arguments(model, config, from_checkpoint, allow_untested)
    check_adapter_name(adapter_name)
    need_float_dtype("lora_dtype", lora_dtype)
    check_device("lora_device", lora_device)
    check_nonfinite(nonfinite)
    config = dataclasses.replace(config or KTConfig(), **settings)
    if config.full_weight_grad and from_checkpoint:
        raise ValueError(
            "full_weight_grad=True with from_checkpoint=True: the model's own weights are trained; "
            "accepted: from_checkpoint=False"
        )
    if config.full_weight_grad and hasattr(model, "peft_config"):
        raise ValueError(
            "full_weight_grad=True with a PeftModel, whose checkpoints have adapters only; "
            "accepted: the model without PEFT"
        )
    found = dict(_fused_experts(model))
    if any(isinstance(module, LoraExperts) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__}: the experts are wrapped already; wrap_experts is called once"
        )
    if not found:
        raise ValueError(
            f"{type(model).__name__}: no module with experts in 3-D parameters gate_up_proj and "
            "down_proj, as transformers 5 has them"
        )
    check_peft_model(model, adapter_name, found)
    top_k = _experts_per_token(model)
    opened = {path: open_fused(path, module, allow_untested) for path, module in found.items()}
    del found
    path = get_sft_weight_path(config) if from_checkpoint else None
    masks = _masks_of(gpu_experts_masks, len(opened))
    wrappers = {
        name: _make_layer(name, fused, top_k, path, config, mask)
        for (name, fused), mask in zip(opened.items(), masks, strict=True)
    }
    for name, fused in opened.items():
        _check_hot(name, fused, wrappers[name])
    if path is None:
        for name, fused in opened.items():
            wrappers[name].check_weights(**fused.weights())
    make = module_class()
    modules: dict[str, LoraExperts] = {}
    with contextlib.ExitStack() as undo:
        for name, wrapper in wrappers.items():
            fused = opened.pop(name)  # nobody else but the model has the weights
            hot = _hot_experts(fused, wrapper)
            order = torch.arange(wrapper.num_experts, device="cpu")
            if path is None:
                weights = fused.weights()
                wrapper.load_weights_from_tensors(**weights, physical_to_logical_map_cpu=order)
                del weights
            else:
                wrapper.load_weights(order)
            modules[name] = module = make(
                wrapper,
                layout=fused.layout,
                adapter_name=adapter_name,
                dtype=lora_dtype,
                device="cpu" if lora_device is None else lora_device,
                pinned=lora_device is not None,
                nonfinite=nonfinite,
                base=fused if config.full_weight_grad else None,
                hot=hot,
            )
            module.train(fused.module.training)
            parent, _, child = name.rpartition(".")
            if fused.on_meta:  # so it costs no memory to keep it
                undo.callback(setattr, model.get_submodule(parent), child, fused.module)
            setattr(model.get_submodule(parent), child, module)
        _freeze(model, modules)
        undo.pop_all()
    _keep_from_broadcasts(model, modules)
    refuse_merging(model)
    if config.full_weight_grad:
        model.register_load_state_dict_pre_hook(functools.partial(_stack_experts, modules))
    return modules


def wrapped_experts(model: nn.Module) -> dict[str, LoraExperts]:
    """The modules that `wrap_experts` made, by their names in the model.

    Raises:
        TypeError, ValueError: ``model`` is no module, or has none of them.
    """
    _need_module(model)
    modules = {n: module for n, module in model.named_modules() if isinstance(module, LoraExperts)}
    if not modules:
        raise ValueError(f"{type(model).__name__}: no wrapped experts; call wrap_experts first")
    return modules


def _check_arguments(model: Any, config: Any, from_checkpoint: Any, allow_untested: Any) -> None:
    _need_module(model)
    if config is not None and not isinstance(config, KTConfig):
        raise TypeError(f"config must be a KTConfig or None, got {type(config).__name__}")
    need_bool("from_checkpoint", from_checkpoint)
    need_bool("allow_untested", allow_untested)


def _need_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _freeze(model: nn.Module, modules: dict[str, LoraExperts]) -> None:
    """All parameters but those of LoRA."""
    if hasattr(model, "peft_config"):  # PEFT has done it
        return
    trained = {parameter for module in modules.values() for parameter in module.parameters()}
    for parameter in model.parameters():
        if parameter not in trained:
            parameter.requires_grad_(False)


def _stack_experts(
    modules: dict[str, LoraExperts], model: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Stacks the weights of a checkpoint that lists each expert: transformers saves models in this
    form, and Trainer loads such a file as it is when it resumes."""
    for path, module in modules.items():
        place = f"{prefix}{module.layout.single_path(path)}"
        keys = [
            [f"{place}.{expert}.{name}.weight" for expert in range(module.wrapper.num_experts)]
            for name in module.layout.names
        ]
        if module.layout.interleaved or not all(key in state for each in keys for key in each):
            continue
        gate, up, down = (torch.stack([state.pop(key) for key in each]) for each in keys)
        state[f"{prefix}{path}.gate_up_proj"] = torch.cat([gate, up], 1)
        state[f"{prefix}{path}.down_proj"] = down


def _keep_from_broadcasts(model: nn.Module, modules: dict[str, LoraExperts]) -> None:
    """DistributedDataParallel would send the hot experts' weights to all ranks in every pass."""
    names = [
        f"{name}.hot.{buffer}"
        for name, module in modules.items()
        if module.hot is not None
        for buffer, _ in module.hot.named_buffers()
    ]
    if names:
        ignored = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, [*ignored, *names]
        )


def _fused_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if is_fused(module) and not isinstance(module, LoraExperts):
            yield name, module


def _masks_of(masks: Any, layers: int) -> list[torch.Tensor | None]:
    """The mask of each layer; None where none was given."""
    if masks is None:
        return [None] * layers
    if not isinstance(masks, torch.Tensor):
        raise TypeError(f"gpu_experts_masks must be a tensor or None, got {type(masks).__name__}")
    if masks.dim() != 2 or len(masks) != layers:
        raise ValueError(
            f"gpu_experts_masks must be [{layers}, E], a row for each MoE layer, got "
            f"{list(masks.shape)}"
        )
    return list(masks)


def _check_hot(name: str, fused: Fused, wrapper: BaseSFTMoEWrapper) -> None:
    """Raises ValueError where experts on the GPU cannot be had."""
    if not wrapper.num_gpu_experts:
        return
    if wrapper.full_weight_grad:
        raise ValueError(
            f"{name}: {wrapper.num_gpu_experts} experts on the GPU with full_weight_grad=True; "
            "accepted: all experts on the CPU"
        )
    if fused.on_meta:
        raise ValueError(
            f"{name}: {wrapper.num_gpu_experts} experts on the GPU, whose weights are those of the "
            "model, which are on the meta device; load them, or keep all experts on the CPU"
        )


def _hot_experts(fused: Fused, wrapper: BaseSFTMoEWrapper) -> HotExperts | None:
    slots = wrapper.gpu_experts_mask.nonzero().flatten().tolist()
    if not slots:
        return None
    return HotExperts(
        fused,
        slots,
        scaling=wrapper.lora_scaling,
        dropout=wrapper.lora_dropout,
        skip_lora_grads=wrapper._sft.method.skip_lora_grads,
    )


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
    name: str,
    fused: Fused,
    top_k: int,
    path: Path | None,
    config: KTConfig,
    mask: torch.Tensor | None,
) -> BaseSFTMoEWrapper:
    experts, hidden, inter = fused.sizes
    wrapper: BaseSFTMoEWrapper = KTMoEWrapper(
        layer_idx=layer_number(name),
        num_experts=experts,
        num_experts_per_tok=top_k,
        hidden_size=hidden,
        moe_intermediate_size=inter,
        weight_path=path,
        gpu_experts_mask=mask,
        swiglu_limit=fused.swiglu_limit,
        swiglu_alpha=fused.swiglu_alpha,
        **config.wrapper_arguments(),
    )
    return wrapper
