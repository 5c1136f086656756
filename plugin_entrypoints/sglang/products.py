"""SGLang plugin: products with streamed experts. Imported only inside SGLang."""

from dataclasses import replace

import torch
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.topk import StandardTopKOutput

from kt_kernel.device.streaming.streamer import Group
from kt_kernel.moe.activation import ExpertActivation
from kt_kernel.serving.activations import SILU


def interleaves(activation: ExpertActivation) -> bool | None:
    """As `kt_kernel.serving.streaming_start.EngineSide.interleaves`: for gpt-oss."""
    if activation == SILU:
        return False
    limit, alpha = activation.swiglu_limit, activation.swiglu_alpha
    same = replace(SILU, swiglu_limit=limit, swiglu_alpha=alpha) == activation
    return True if same and limit and alpha else None


def products(
    x: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    group: Group,
    activation: ExpertActivation,
) -> torch.Tensor:
    """The sum [T, H] of experts, by SGLang's Triton kernels; as
    `kt_kernel.serving.streaming.Products`."""
    # It imports kernels that exist for GPUs only.
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts

    # Without a number of experts, the kernels skip routes with -1. They need int32.
    config = MoeRunnerConfig(
        activation="silu",
        inplace=False,
        gemm1_alpha=activation.swiglu_alpha or None,
        gemm1_clamp_limit=activation.swiglu_limit or None,
    )
    routes = StandardTopKOutput(weights, slots.to(torch.int32), None)
    b1, b2 = group.biases or (None, None)
    return fused_experts(x.contiguous(), group.w13, group.w2, routes, config, b1=b1, b2=b2)
