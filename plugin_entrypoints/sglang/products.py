"""SGLang plugin: products with streamed experts. Imported only inside SGLang."""

import torch
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.topk import StandardTopKOutput


def products(
    x: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    """The sum [T, H] of experts, by SGLang's Triton kernels; as
    `kt_kernel.serving.streaming.Products`."""
    # It imports kernels that exist for GPUs only.
    from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts

    # Without a number of experts, the kernels skip routes with -1. They need int32.
    config = MoeRunnerConfig(activation="silu", inplace=False)
    routes = StandardTopKOutput(weights, slots.to(torch.int32), None)
    return fused_experts(x.contiguous(), w13, w2, routes, config)
