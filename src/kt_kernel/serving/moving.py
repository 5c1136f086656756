"""Decides before the start whether experts can move: --kt-enable-dynamic-expert-update.

Without this, `AUTO` would keep all experts on the CPU for a cache that cannot run. What only loaded
layers tell is checked by `cache_start`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from ..runtime.variant import kernel_kind
from ..weights.formats import FP8_BLOCK, INT4_ZERO
from ..weights.methods import get_method
from .option_table import AUTO, ENGINE, PACKED, OptionError
from .options import KTOptions
from .placement import plan_placement

CACHE_FLAG = "--kt-enable-dynamic-expert-update"
KIND_RULES_IT_OUT = "with KT_KERNEL_KIND, results must not depend on when experts move"
NO_SPLIT_LAYER = "no layer has both hot and cold experts"


def decide_moving(
    options: KTOptions,
    config: Any,
    *,
    device: str,
    ranks: int,
    quantisation: str | None,
    logger: logging.Logger,
) -> KTOptions:
    """The options, with `AUTO` replaced by "off", and the reason logged, if experts cannot move.

    Args:
        options: prepared, see `preflight.prepare`.
        config: the language model's configuration.
        device: the engine's type of device.
        ranks: of tensor parallelism.
        quantisation: the engine's name of the served model's; None or "" for 16-bit weights.

    Raises:
        OptionError: the option is "on", and experts cannot move.
    """
    if not options.moves_experts:
        return options
    why = _why_not(options, config, device, ranks, quantisation)
    if not why:
        return options
    if options.enable_dynamic_expert_update != AUTO:
        raise refusal(why)
    logger.info("kt: experts do not move while serving: %s", why)
    return replace(options, enable_dynamic_expert_update="off", expert_update_rate=None)


def refusal(why: object) -> OptionError:
    """The error of a start with the flag on."""
    return OptionError(f"{CACHE_FLAG} on: {why}; remove the flag")


def _why_not(
    options: KTOptions, config: Any, device: str, ranks: int, quantisation: str | None
) -> str:
    if options.expert_lora_path is not None:
        return f"not supported with --kt-expert-lora-path {options.expert_lora_path}"
    if not plan_placement(options, config).some_split:
        return f"{NO_SPLIT_LAYER} with {options.hot_option}"
    if ranks > 1:
        return f"tensor parallelism is not supported ({ranks} ranks)"
    if device not in ("cuda", "cpu"):
        return f"the engine's device is {device}; accepted: cuda, cpu"
    method = get_method(options.method).format
    if options.hot_format == PACKED and method == INT4_ZERO:
        return (
            f"packed hot experts of method {options.method} have zero points, which are not copied "
            "to a GPU; accepted: --kt-hot-format bf16"
        )
    if options.hot_format == ENGINE and quantisation and method != FP8_BLOCK:
        return (
            f"the engine holds hot experts quantised with {quantisation}, and the CPU those of "
            f"method {options.method}, which cannot be copied to each other's place; accepted: "
            "--kt-hot-format bf16"
        )
    return KIND_RULES_IT_OUT if kernel_kind() else ""
