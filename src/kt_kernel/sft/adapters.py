"""`save_adapter` and `load_adapter` write and read PEFT checkpoints of wrapped experts."""

from __future__ import annotations

import math
import os
import re
import warnings
from typing import Any, cast

import torch
from torch import nn

from ..adapter.files import PREFIX, Adapter, read_adapter, write_adapter
from .lora import LORA_NAMES
from .modules import LoraExperts
from .peft_format import from_fused, from_single, to_fused, to_single
from .peft_layer import need_adapter
from .wrap import wrapped_experts

FUSED, PER_EXPERT = "fused", "per_expert"

_NEW_CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "auto_mapping": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "target_modules": [],
    "use_dora": False,
    "use_rslora": False,
}


def save_adapter(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    layout: str = FUSED,
    base_model: str | os.PathLike[str] | None = None,
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, which PEFT loads.

    The configuration sets dropout to 0, because PEFT has no dropout for 3-D parameters. A
    RuntimeWarning names trained parameters that are not in the files, such as those of a router.

    Args:
        model: A model with wrapped experts. If it is a ``PeftModel``, its other LoRA tensors are
            written, too.
        layout: "fused" for models whose experts are 3-D parameters, as in transformers 5. PEFT has
            one A for gate and up, so the adapter of ``gate_up_proj`` has rank 2R. "per_expert" for
            models with an ``nn.Linear`` for each projection of each expert.
        base_model: The name of the base model. Default: the name in the model's config.

    Raises:
        ValueError: The model has no wrapped experts, its layers differ in rank or alpha, or
            ``layout`` is unknown or does not exist for this family, or base weights are trained.
        OSError: The files cannot be written.
    """
    modules = {name.removeprefix(PREFIX): m for name, m in wrapped_experts(model).items()}
    if layout not in (FUSED, PER_EXPERT):
        raise ValueError(f"layout={layout!r}; accepted: {FUSED!r}, {PER_EXPERT!r}")
    rank, scaling = _common(modules)
    for name, module in modules.items():
        if module.trains_base_weights:
            raise ValueError(
                f"{name}: its base weights are trained, too, and an adapter does not contain them; "
                "save the whole model with save_pretrained"
            )
    config, tensors = _others(model, modules)
    _warn_of_left_out(model, tensors)
    if base_model is not None:
        config["base_model_name_or_path"] = os.fspath(base_model)
    config["lora_dropout"] = 0.0
    describe = _describe_fused if layout == FUSED else _describe_single
    describe(config, modules, rank, scaling)
    for path, module in modules.items():
        lora = module.lora_parameters()
        if layout == FUSED:
            found = to_fused(lora, module.layout)
        else:
            found, path = to_single(lora, module.layout), module.layout.single_path(path)
        tensors |= {f"{PREFIX}{path}.{name}": tensor for name, tensor in found.items()}
    write_adapter(
        folder, config, {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    )


def load_adapter(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Loads a PEFT adapter, in either layout, into the LoRA parameters of wrapped experts.

    If the adapter also has tensors of other modules, ``model`` must be a ``PeftModel``.

    Raises:
        FileNotFoundError: The folder has no adapter.
        ValueError: The adapter belongs to another model (layers, shapes), has another rank or
            alpha, or has tensors that the model has no place for. No parameter is changed then.
    """
    adapter = read_adapter(folder)
    modules = {name.removeprefix(PREFIX): m for name, m in wrapped_experts(model).items()}
    remaining = dict(adapter.tensors)
    loaded = []
    for path, module in modules.items():
        lora = _take_layer(adapter, remaining, path, module)
        for name, parameter in module.lora_parameters().items():
            place = f"{adapter.folder}: {path}: {name}"
            if lora[name].shape != parameter.shape:
                raise ValueError(
                    f"{place} has shape {list(lora[name].shape)}, but the model's has "
                    f"{list(parameter.shape)}; the adapter belongs to another model"
                )
            if not bool(lora[name].to(parameter.dtype).isfinite().all()):
                raise ValueError(
                    f"{place} has a value that is NaN, infinite or beyond {parameter.dtype}"
                )
        loaded.append((module, lora))
    adapter_name = next(iter(modules.values())).adapter_name
    _check_remaining(adapter, remaining, model, adapter_name)
    if remaining:
        _load_others(adapter, remaining, model, adapter_name)
    with torch.no_grad():
        for module, lora in loaded:
            for name, parameter in module.lora_parameters().items():
                parameter.copy_(lora[name])


def _common(modules: dict[str, LoraExperts]) -> tuple[int, float]:
    """Returns the rank and the scaling that all layers share."""
    found = {(m.wrapper.lora_rank, m.wrapper.lora_scaling) for m in modules.values()}
    if len(found) > 1:
        raise ValueError(f"the layers differ in (rank, alpha / rank): {sorted(found)}")
    return found.pop()


def _others(
    model: nn.Module, modules: dict[str, LoraExperts]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Returns the configuration and tensors of the modules that PEFT adapts.

    Without such modules, the configuration is a new one, and there are no tensors.
    """
    if not hasattr(model, "peft_config"):
        name = getattr(getattr(model, "config", None), "name_or_path", None)
        return dict(_NEW_CONFIG) | {"base_model_name_or_path": name or None}, {}
    from peft import get_peft_model_state_dict

    adapter = next(iter(modules.values())).adapter_name
    configs = cast(dict[str, Any], model.peft_config)
    need_adapter(configs, adapter)
    config = configs[adapter].to_dict() | {"inference_mode": True}
    ours = tuple(f"{PREFIX}{path}." for path in modules)
    state = get_peft_model_state_dict(model, adapter_name=adapter)
    return config, {name: tensor for name, tensor in state.items() if not name.startswith(ours)}


def _warn_of_left_out(model: nn.Module, others: dict[str, torch.Tensor]) -> None:
    """Warns of parameters that are trained and are neither LoRA of experts nor among ``others``."""
    kept = {tensor.data_ptr() for tensor in others.values()}
    for module in wrapped_experts(model).values():
        kept |= {parameter.data_ptr() for parameter in module.parameters()}
    left_out = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.data_ptr() not in kept
    ]
    if left_out:
        warnings.warn(
            f"the adapter does not contain {len(left_out)} trained parameters, such as "
            f"{left_out[0]}; keep their values yourself, with model.state_dict()",
            RuntimeWarning,
            stacklevel=3,
        )


def _describe_fused(
    config: dict[str, Any], modules: dict[str, LoraExperts], rank: int, scaling: float
) -> None:
    """Completes a configuration for tensors of `to_fused`."""
    ranks: dict[str, int] = {}
    for path in modules:
        block = path.rpartition("layers.")[2].partition(".")[2]
        ranks |= {f"{block}.gate_up_proj": 2 * rank, f"{block}.down_proj": rank}
    if "r" not in config:
        config |= {"r": rank, "lora_alpha": _alpha(config, rank, scaling)}
    config["target_parameters"] = sorted({*(config.get("target_parameters") or ()), *ranks})
    alphas = {name: _alpha(config, each, scaling) for name, each in ranks.items()}
    for key, ours in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        others = config.get(key) or {}
        # The first pattern that matches counts, and others may match experts, too.
        config[key] = ours | {name: value for name, value in others.items() if name not in ours}


def _describe_single(
    config: dict[str, Any], modules: dict[str, LoraExperts], rank: int, scaling: float
) -> None:
    """Completes a configuration for tensors of `to_single`.

    PEFT's conversion for fused experts takes their rank and alpha from ``r`` and ``lora_alpha``, so
    those of other modules become patterns.
    """
    for path, module in modules.items():
        if not module.layout.single:
            raise ValueError(
                f"{path}: there are no checkpoints of this family with experts of their own; pass "
                f"layout={FUSED!r}"
            )
    names = dict.fromkeys(name for m in modules.values() for name in m.layout.names)
    # Also as if the experts had no numbers: PEFT looks for that where they are fused.
    targets = [rf".*\.experts\.(\d+\.)?({'|'.join(names)})"]
    others = config.get("target_modules")
    if isinstance(others, str):
        targets.append(others)
    elif others:
        others = rf"(.*\.)?({'|'.join(map(re.escape, sorted(others)))})"
        targets.append(others)
    config["target_modules"] = "|".join(f"({target})" for target in targets)
    for key, default, value in (
        ("rank_pattern", "r", rank),
        ("alpha_pattern", "lora_alpha", _alpha(config, rank, scaling)),
    ):
        before = config.get(default, value)
        config[default] = value
        if others and before != value:
            config[key] = (config.get(key) or {}) | {others: before}


def _alpha(config: dict[str, Any], rank: int, scaling: float) -> float:
    alpha = scaling * (math.sqrt(rank) if config.get("use_rslora") else rank)
    return int(alpha) if alpha.is_integer() else alpha


def _take_layer(
    adapter: Adapter, remaining: dict[str, torch.Tensor], path: str, module: LoraExperts
) -> dict[str, torch.Tensor]:
    """Removes a layer's tensors from ``remaining``; returns its six LoRA tensors."""
    wrapper, layout = module.wrapper, module.layout
    found: dict[str, torch.Tensor] = {}
    prefixes = dict.fromkeys(f"{PREFIX}{p}." for p in (path, layout.single_path(path)))
    for prefix in prefixes:
        for name in [name for name in remaining if name.startswith(prefix)]:
            found[name.removeprefix(prefix)] = remaining.pop(name)
    place = f"{adapter.folder}: {path}"
    if not found:
        raise ValueError(f"{place}: the adapter has no tensors of this layer's experts")
    fused = any(not name[0].isdigit() for name in found)
    try:
        if fused:
            lora = from_fused(found, wrapper.num_experts, wrapper.lora_rank, layout)
            ranks = {
                f"{path}.gate_up_proj": len(found["base_layer.lora_A.weight"]),
                f"{path}.down_proj": len(found["lora_A.weight"]),
            }
            ranks = {name: rows // wrapper.num_experts for name, rows in ranks.items()}
        else:
            lora = from_single(found, wrapper.num_experts, layout)
            ranks = {
                f"{layout.single_path(path)}.0.{name}": len(found[f"0.{name}.lora_A.weight"])
                for name in layout.names
            }
    except KeyError as error:
        raise ValueError(
            f"{place}: tensor {error.args[0]} is missing; the adapter belongs to another model"
        ) from None
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    expected = 4 if fused else len(LORA_NAMES) * wrapper.num_experts
    if len(found) > expected:
        raise ValueError(
            f"{place}: the adapter has {len(found)} tensors, but {wrapper.num_experts} experts "
            f"need {expected}; the adapter belongs to another model"
        )
    for name, rank in ranks.items():
        scaling = adapter.scaling(name, rank)
        if not math.isclose(scaling, wrapper.lora_scaling, rel_tol=1e-6):
            raise ValueError(
                f"{place}: {name} has rank {rank} and scaling {scaling:g}, but the experts were "
                f"wrapped with lora_alpha / lora_rank = {wrapper.lora_scaling:g}"
            )
    return lora


def _check_remaining(
    adapter: Adapter, remaining: dict[str, torch.Tensor], model: nn.Module, adapter_name: str
) -> None:
    """Raises ValueError if the model has no place for a remaining tensor."""
    if not remaining:
        return
    some = f"{len(remaining)} tensors, such as {min(remaining)}"
    configs = getattr(model, "peft_config", None)
    if configs is None:
        raise ValueError(
            f"{adapter.folder}: the model has no place for {some}; call peft.get_peft_model before "
            "wrap_experts"
        )
    need_adapter(cast(dict[str, Any], configs), adapter_name)
    named = {name.removeprefix(PREFIX) for name, _ in model.named_modules()}
    lost = [
        name for name in remaining if name.removeprefix(PREFIX).rpartition(".lora_")[0] not in named
    ]
    if lost:
        raise ValueError(
            f"{adapter.folder}: the model has no module for {len(lost)} tensors, such as "
            f"{min(lost)}; the adapter belongs to another model"
        )


def _load_others(
    adapter: Adapter, remaining: dict[str, torch.Tensor], model: Any, adapter_name: str
) -> None:
    """Lets PEFT load the tensors of other modules, and restores theirs if PEFT refuses one."""
    from peft import set_peft_model_state_dict

    ours = tuple(f"{name}." for name in wrapped_experts(model))
    before = {
        name: tensor.detach().clone()
        for name, tensor in model.state_dict().items()
        if not name.startswith(ours) and (adapter_name in name.split(".") or name in remaining)
    }
    problem = None
    try:
        result = set_peft_model_state_dict(model, remaining, adapter_name=adapter_name)
        if result.unexpected_keys:
            problem = (
                f"PEFT has no place for {len(result.unexpected_keys)} tensors, such as "
                f"{min(result.unexpected_keys)}"
            )
    except (KeyError, RuntimeError, ValueError) as error:
        problem = f"PEFT cannot load {len(remaining)} tensors: {error}"
    if problem is not None:
        model.load_state_dict(before, strict=False)
        raise ValueError(f"{adapter.folder}: {problem}; the adapter belongs to another model")
