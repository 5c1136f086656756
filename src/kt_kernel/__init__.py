"""Mixture-of-Experts inference with experts on the CPU, next to a GPU engine.

Names are loaded at first use, so that reading options during an engine's start stays cheap. The
import checks the platform, the files of the package, and the variables that select kernels.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kt_kernel import _conflict

with _conflict.told_to_engines():
    from kt_kernel.runtime import variant

    variant.check_platform()
    _conflict.check()
    # An engine swallows errors of plugins. If kt options may exist that are not visible yet, the
    # variables are checked together with them.
    if _conflict.options_visible() or not _conflict.in_engine():
        variant.check_environment()

if TYPE_CHECKING:
    from kt_kernel.experts import (
        AMXMoEWrapper,
        BaseMoEWrapper,
        InferenceMoEWrapper,
        KExpertsCPUBuffer,
        KTMoEWrapper,
    )
    from kt_kernel.moe.chain import model_scope
    from kt_kernel.moe.placement import generate_gpu_experts_masks
    from kt_kernel.runtime.variant import cpu_features
    from kt_kernel.sft.amx import AMXSFTMoEWrapper
    from kt_kernel.sft.base import BaseSFTMoEWrapper
    from kt_kernel.weights.methods import INFERENCE_METHODS, SFT_METHODS

    __version__: str
    __cpu_variant__: str
    __cpu_kernel__: str

__all__ = [
    "INFERENCE_METHODS",
    "SFT_METHODS",
    "AMXMoEWrapper",
    "AMXSFTMoEWrapper",
    "BaseMoEWrapper",
    "BaseSFTMoEWrapper",
    "InferenceMoEWrapper",
    "KExpertsCPUBuffer",
    "KTMoEWrapper",
    "__cpu_kernel__",
    "__cpu_variant__",
    "__version__",
    "cpu_features",
    "generate_gpu_experts_masks",
    "model_scope",
]

_HOMES = {
    "AMXMoEWrapper": "experts",
    "AMXSFTMoEWrapper": "sft.amx",
    "BaseMoEWrapper": "experts",
    "BaseSFTMoEWrapper": "sft.base",
    "InferenceMoEWrapper": "experts",
    "KExpertsCPUBuffer": "experts",
    "KTMoEWrapper": "experts",
    "INFERENCE_METHODS": "weights.methods",
    "SFT_METHODS": "weights.methods",
    "generate_gpu_experts_masks": "moe.placement",
    "model_scope": "moe.chain",
    "cpu_features": "runtime.variant",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"kt_kernel.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    # Both are evaluated on each access: the environment may lower the instruction set.
    if name == "__cpu_variant__":
        return importlib.import_module("kt_kernel.runtime.variant").cpu_variant()
    if name == "__cpu_kernel__":
        return importlib.import_module("kt_kernel.runtime.variant").kernel_table()
    if name == "__version__":  # kept: another version may be installed while this process runs
        from importlib import metadata

        try:
            found = metadata.version("kt-moe")
        except metadata.PackageNotFoundError:  # a source tree on the path, not installed
            found = "0+uninstalled"
        globals()[name] = found
        return found
    raise AttributeError(f"module 'kt_kernel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
