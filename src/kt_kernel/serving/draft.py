"""Speculative decoding: the options for a draft model that has experts of its own.

The served model needs nothing special: it sees a few tokens of each request in a step, and nothing
outlives a step. A draft model, such as the layer that predicts further tokens (MTP), is a
`HybridModel` of its own, with its own chain for deferral.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

from ..runtime.nested import text_config
from ..weights.methods import get_method
from .class_check import read_config
from .model_config import has_experts
from .option_table import ENGINE
from .options import KTOptions

_UNQUANTISED = "BF16"


def may_have_experts(model: str, revision: str | None) -> bool:
    """Whether a draft model may have experts. True if its configuration cannot be read.

    model: folder or repository. revision: of a repository; None: its main branch.
    """
    if revision is not None and not os.path.exists(model):
        model = f"{model}@{revision}"
    try:
        return has_experts(SimpleNamespace(**text_config(read_config(model))))
    except (OSError, ValueError):
        return True


def draft_options(options: KTOptions, quantisation: str | None) -> KTOptions:
    """The options for a draft model's experts.

    - As many experts of a layer are hot as in the served model, or all if a draft's layer has
      fewer: the first ones, because masks and statistics are those of the served model. With a
      mask, none is hot.
    - The engine delivers the weights of the cold ones, so a method that keeps quantised values is
      replaced by BF16.
    - All experts of a quantised draft model are hot: its single tensors mean nothing to kt-moe, and
      its layers have other names in the files than in the engine.
    - Nothing is streamed or recorded, no expert moves, and no adapter is merged.

    Args:
        options: the served model's, prepared.
        quantisation: the engine's name of the draft model's quantisation; None or "" for none.
    """
    method = options.method
    if get_method(method).quantised:
        method = _UNQUANTISED
    number, ratio = options.num_gpu_experts, options.gpu_experts_ratio
    if quantisation:
        number, ratio = None, 1.0
    return replace(
        options,
        method=method,
        weight_path=None,
        num_gpu_experts=number,
        gpu_experts_ratio=ratio,
        gpu_experts_mask=None,
        hot_format=ENGINE,
        enable_dynamic_expert_update="off",
        expert_placement_strategy=None,
        expert_stats=None,
        record_kt_gpu_expert_distribution=None,
        record_kt_expert_routes=None,
        expert_routes_tokens=None,
        expert_lora_path=None,
        gpu_prefill_token_threshold=0,
        gpu_prefill_memory=None,
    )
