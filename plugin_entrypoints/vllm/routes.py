"""vLLM plugin: how vLLM's kernels treat routes to experts that they do not have.

A cold route has weight 0, but it must not be computed with an arbitrary hot expert: if that
expert's values overflow on the token, infinity times 0 is NaN. Imported only inside vLLM.
"""

import functools
from typing import Any

import torch

# The package first, because vLLM's modules have circular imports.
import vllm.model_executor.layers.fused_moe  # noqa: F401
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

from kt_kernel.device.streaming.streamer import Group
from kt_kernel.moe.activation import ExpertActivation
from kt_kernel.serving.activations import GPT_OSS, SILU

# Whether vLLM's Triton kernels skip cold routes. If not, and in all other kernels, a cold route
# repeats a hot one with weight 0.
_SKIP = True


def skip_cold_routes(experts: Any, num_slots: int) -> "SkipColdRoutes | None":
    """How the kernel of vLLM's RoutedExperts skips cold routes; None if it is not known to skip
    them. CPU kernels, for instance, would write out of bounds. num_slots: the experts that vLLM has
    allocated, fewer than the layer has."""
    kernel = experts.quant_method.moe_kernel
    if not _SKIP or kernel is None or not isinstance(kernel.fused_experts, TritonExperts):
        return None
    device = next(experts.parameters()).device
    return SkipColdRoutes(num_slots, experts.global_num_experts, experts.top_k, device)


class SkipColdRoutes:
    """How vLLM's Triton kernel skips the cold routes of a layer; their results are zeros.

    In the smallest batches, each route is a block of its own, and blocks of expert -1 are skipped.
    Larger batches are first sorted by expert, by code that does not accept -1. There, the expert
    map marks the experts to skip, as it does for experts on other ranks.
    """

    def __init__(self, num_slots: int, experts: int, top_k: int, device: torch.device) -> None:
        # Routes name slots, so the map is the same for every placement.
        rows = [*range(num_slots), *[-1] * (experts - num_slots)]
        self._map = torch.tensor(rows, dtype=torch.int32, device=device)
        self._any_cold = num_slots
        self._unsorted = _largest_unsorted_batch(experts, top_k, device)
        self.expert_map: torch.Tensor | None = self._map  # for the batch passed to `prepare`

    def prepare(self, tokens: int) -> int:
        """The slot number of cold experts in a batch of this size."""
        sorts = tokens > self._unsorted
        self.expert_map = self._map if sorts else None
        return self._any_cold if sorts else -1


@functools.cache
def _largest_unsorted_batch(experts: int, top_k: int, device: torch.device) -> int:
    """The largest number of tokens for which vLLM's kernel uses routes unsorted, according to
    vLLM's own function."""
    tokens = 0
    while True:
        ids = torch.zeros(tokens + 1, top_k, dtype=torch.int32, device=device)
        config = {"BLOCK_SIZE_M": 16}
        try:
            order = fused_moe._prepare_expert_assignment(
                ids, config, tokens + 1, top_k, experts, None
            )[0]
        except TypeError:  # a version with another signature
            return 0
        if order is not None:
            return tokens
        tokens += 1


def interleaves(activation: ExpertActivation) -> bool | None:
    """As `kt_kernel.serving.streaming_start.EngineSide.interleaves`. vLLM's kernel for gpt-oss has
    fixed numbers."""
    return {SILU: False, GPT_OSS: True}.get(activation)


def products(
    x: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    group: Group,
    activation: ExpertActivation,
) -> torch.Tensor:
    """The sum [T, H] of experts that were copied to the device, by vLLM's Triton kernels.

    As `kt_kernel.serving.streaming.Products`. Routes to no expert get the number after the last
    expert, which the expert map marks as remote.
    """
    experts = len(group.w13)
    ids = slots.masked_fill(slots < 0, experts)
    name = MoEActivation("swigluoai" if activation == GPT_OSS else "silu")
    return fused_moe.fused_experts(
        x.contiguous(),
        group.w13,
        group.w2,
        weights,
        ids,
        activation=name,
        global_num_experts=experts + 1,
        expert_map=_all_but_the_last(experts, x.device),
        quant_config=None if group.biases is None else biased_moe_quant_config(*group.biases),
    )


@functools.lru_cache(maxsize=16)
def _all_but_the_last(experts: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([*range(experts), -1], dtype=torch.int32, device=device)


def repeat_hot_routes(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Real slots for kernels that compute every route; cold routes are -1 and have weight 0.

    A cold route gets the slot of one of its token's hot routes. Another slot could belong to an
    expert whose values overflow on this token, and infinity times 0 is NaN. Returns slots [T, k]
    and bool [T, 1], True for tokens with a hot route. The results of the other tokens must be
    dropped.
    """
    hot = slots >= 0
    first = hot.to(torch.uint8).argmax(1, keepdim=True)
    own = slots.gather(1, first).clamp_min(0)
    return torch.where(hot, slots, own), hot.any(1, keepdim=True)
