"""Memory for hot experts: --kt-gpu-experts-memory, and how many bytes an expert takes there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..checkpoint import Checkpoint
from ..runtime.text import shown_size
from ..weights.expert_tensors import BIASES
from ..weights.formats import BLOCK_SIZE, INT4_ZERO, INT8_ROW
from ..weights.methods import get_method
from .model_config import described_layers, expert_sizes, has_gate, num_experts
from .option_table import ENGINE, PACKED, OptionError
from .options import KTOptions

FLAG = "--kt-gpu-experts-memory"
_BIAS_BYTES = 4  # in SGLang; vLLM's have the type of the weights


def hot_expert_bytes(
    options: KTOptions,
    hidden: int,
    inter: int,
    value_bytes: int,
    checkpoint: Checkpoint | None,
    gated: bool = True,
) -> float:
    """Bytes of one hot expert on a rank.

    Args:
        options: with the method and the format of hot experts.
        hidden, inter: sizes of the rank's part of the expert.
        value_bytes: of a 16- or 32-bit weight on the engine's device.
        checkpoint: the files of the experts, if kt-moe reads them.
        gated: whether the expert has a gate.
    """
    inner = 2 if gated else 1  # matrices besides down: gate and up, or up alone
    weights = (inner + 1) * hidden * inter
    if options.hot_format == PACKED:
        method = get_method(options.method)
        if method.format == INT8_ROW:
            return weights + (inner * inter + hidden) * 4  # float32 scales of rows
        # A nibble per weight and a scale per group; unsigned codes have a zero point per group.
        zeros = 0.5 if method.format == INT4_ZERO else 0
        return weights * (0.5 + (value_bytes + zeros) / _group_size(options, checkpoint))
    if options.hot_format == ENGINE and checkpoint is not None and _holds_fp8(checkpoint):
        return weights * (1 + 4 / BLOCK_SIZE**2)
    size = weights * value_bytes
    if options.hot_format != ENGINE and checkpoint is not None and _have_biases(checkpoint):
        size += (inner * inter + hidden) * _BIAS_BYTES
    return size


def with_ratio(
    options: KTOptions,
    config: Any,
    checkpoint: Checkpoint | None,
    ranks: int,
    value_bytes: int,
) -> KTOptions:
    """The options with the ratio of hot experts that fit into --kt-gpu-experts-memory, instead of
    that memory: all pairs of layer and expert that fit, or with strategies that look at each layer
    by itself, as many in each.

    Raises:
        OptionError: not one expert fits (of each layer, for those strategies), or the model's
            configuration does not say how many layers have experts.
    """
    memory = options.gpu_experts_memory
    if memory is None:
        return options
    hidden, inter = expert_sizes(config)
    layers = described_layers(config)
    if layers is None or not hidden or not inter:
        raise OptionError(
            f"{FLAG} {shown_size(memory)}: the model's configuration does not say which layers "
            "have experts of which sizes; accepted: --kt-num-gpu-experts, --kt-gpu-experts-ratio"
        )
    experts = num_experts(config)
    part = inter // ranks
    each = hot_expert_bytes(options, hidden, part, value_bytes, checkpoint, has_gate(config))
    pairs, everything = int(memory / each), len(layers) * experts
    least = 1 if options.strategy in ("frequency", "front-loading") else len(layers)
    if pairs < least:
        raise OptionError(
            f"{FLAG} {shown_size(memory)}: a hot expert takes {shown_size(each)} on each rank, so "
            f"one in each of {len(layers)} layers takes {shown_size(each * len(layers))}; give at "
            f"least {shown_size(each * least)}, or --kt-num-gpu-experts 0"
        )
    ratio = min(pairs, everything) / everything
    return replace(options, gpu_experts_memory=None, gpu_experts_ratio=ratio)


def _group_size(options: KTOptions, checkpoint: Checkpoint | None) -> int:
    """Columns per scale of packed 4-bit experts."""
    if size := get_method(options.method).group_size:
        return size
    assert checkpoint is not None  # the method keeps what files hold
    layer = checkpoint.layers()[0]
    with checkpoint.each_expert(layer, *checkpoint.sizes(layer), (), options.method) as stream:
        assert stream.form is not None
        return min(form.group_size for form in stream.form)


def _have_biases(checkpoint: Checkpoint) -> bool:
    layer = checkpoint.layers()[0]
    with checkpoint.each_expert(layer, *checkpoint.sizes(layer), ()) as stream:
        return not {*BIASES}.isdisjoint(stream.fields)


def _holds_fp8(checkpoint: Checkpoint) -> bool:
    return any(
        not checkpoint.stored(layer).dense and "FP8" in checkpoint.stored(layer).method
        for layer in checkpoint.layers()
    )
