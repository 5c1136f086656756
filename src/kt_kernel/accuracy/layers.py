"""Loads layers from a path, outside of an engine."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from ..checkpoint import open_checkpoint
from ..moe.inference import InferenceMoEWrapper
from ..moe.settings import check_settings
from ..runtime.variant import KINDS


def load_layer(
    path: str | os.PathLike[str],
    layer_idx: int,
    method: str,
    *,
    top_k: int = 1,
    threads: int | None = None,
    max_deferred: int | None = None,
    scale_search: bool = False,
    swiglu_limit: float = 0.0,
    swiglu_alpha: float = 0.0,
    to_run: bool = True,
) -> InferenceMoEWrapper:
    """All experts of a layer, on the CPU, in logical order; packed unless they already are.

    path: a checkpoint, or weights that were converted. threads: None for what saturates the memory.
    scale_search: see `LayerSettings`. to_run: False spares the measurement of which kernels are
    faster. Raises what `open_checkpoint`, its readers and ``KTMoEWrapper`` raise.
    """
    experts, hidden, inter = open_checkpoint(path).sizes(layer_idx)
    settings = check_settings(
        layer_idx=layer_idx,
        num_experts=experts,
        num_experts_per_tok=top_k,
        hidden_size=hidden,
        moe_intermediate_size=inter,
        cpuinfer_threads=threads,
        weight_path=path,
        max_deferred_experts_per_token=max_deferred,
        method=method,
        swiglu_limit=swiglu_limit,
        swiglu_alpha=swiglu_alpha,
    )
    kind = settings.kind if to_run else KINDS["vector"]
    layer = InferenceMoEWrapper(replace(settings, scale_search=scale_search, kind=kind))
    layer.load_weights(torch.arange(experts, device="cpu"))
    return layer
