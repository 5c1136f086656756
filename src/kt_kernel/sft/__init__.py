"""Fine-tuning of experts on the CPU: LoRA on every projection of every expert.

`wrap_experts` replaces the experts of a transformers model, `save_adapter` and `load_adapter` write
and read PEFT checkpoints, `merge_adapter` puts one into BF16 weights. `KTMoEWrapper(mode="sft")`
is the layer underneath. Names are loaded at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adapters import load_adapter, save_adapter
    from .amx import AMXSFTMoEWrapper
    from .base import BaseSFTMoEWrapper
    from .buffers import KExpertsSFTBuffer
    from .config import KTConfig, get_sft_weight_path
    from .merge import merge_adapter
    from .modules import LoraExperts
    from .wrap import wrap_experts

_HOMES = {
    "AMXSFTMoEWrapper": "amx",
    "BaseSFTMoEWrapper": "base",
    "KExpertsSFTBuffer": "buffers",
    "KTConfig": "config",
    "LoraExperts": "modules",
    "get_sft_weight_path": "config",
    "load_adapter": "adapters",
    "merge_adapter": "merge",
    "save_adapter": "adapters",
    "wrap_experts": "wrap",
}

# What forks of transformers and accelerate import from kt-kernel.
_OF_FORKS = frozenset(
    {
        "get_kt_loading_kwargs",
        "kt_adapt_peft_lora",
        "load_kt_model",
        "update_kt_lora_pointers",
        "wrap_moe_layers_with_kt_wrapper",
    }
)

__all__ = [
    "AMXSFTMoEWrapper",
    "BaseSFTMoEWrapper",
    "KExpertsSFTBuffer",
    "KTConfig",
    "LoraExperts",
    "get_sft_weight_path",
    "load_adapter",
    "merge_adapter",
    "save_adapter",
    "wrap_experts",
]


def __getattr__(name: str) -> Any:
    if name in _OF_FORKS:
        # `from ... import` would replace the message of an AttributeError.
        raise ImportError(
            f"{__name__}.{name} is for the forks transformers-kt and accelerate-kt, which kt-moe "
            "does not need: wrap the experts of a stock transformers model with "
            "kt_kernel.sft.wrap_experts"
        )
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
