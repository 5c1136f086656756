"""vLLM plugin: what vLLM's kernels do with routes to experts that they do not have.

A cold route has weight 0, but it must not be computed with just any hot expert: if that expert's
values overflow on the token, infinity times 0 is NaN. Imported only inside vLLM.
"""

import functools
from typing import Any

import torch

# The package first: vLLM's modules import each other in a circle.
import vllm.model_executor.layers.fused_moe  # noqa: F401
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

# Whether vLLM's Triton kernels are made to skip cold routes. Otherwise, and in all other kernels, a
# cold route repeats a hot one with weight 0.
_SKIP = True


def skip_cold_routes(experts: Any, num_slots: int) -> "SkipColdRoutes | None":
    """How the kernel of vLLM's RoutedExperts skips cold routes; None if it is not known to do so.
    Those for the CPU, for instance, would write out of bounds. num_slots: the experts that it has
    room for, fewer than the layer has."""
    kernel = experts.quant_method.moe_kernel
    if not _SKIP or kernel is None or not isinstance(kernel.fused_experts, TritonExperts):
        return None
    device = next(experts.parameters()).device
    return SkipColdRoutes(num_slots, experts.global_num_experts, experts.top_k, device)


class SkipColdRoutes:
    """How vLLM's Triton kernel skips the cold routes of a layer; their results are zeros.

    In the smallest batches each route is a block of its own, and one whose expert is -1 is skipped.
    Larger batches are sorted by expert first, by code that takes no -1, and a map tells which
    experts the kernel is to skip, as it does for experts of other ranks.
    """

    def __init__(self, num_slots: int, experts: int, top_k: int, device: torch.device) -> None:
        # Routes name slots, so the map is the same for every placement.
        rows = [*range(num_slots), *[-1] * (experts - num_slots)]
        self._map = torch.tensor(rows, dtype=torch.int32, device=device)
        self._any_cold = num_slots
        self._unsorted = _largest_unsorted_batch(experts, top_k, device)
        self.expert_map: torch.Tensor | None = self._map  # of the batch that `prepare` was told

    def prepare(self, tokens: int) -> int:
        """The number that stands for a cold expert in a batch."""
        sorts = tokens > self._unsorted
        self.expert_map = self._map if sorts else None
        return self._any_cold if sorts else -1


@functools.cache
def _largest_unsorted_batch(experts: int, top_k: int, device: torch.device) -> int:
    """Tokens up to which vLLM's kernel takes routes as they are: asked of vLLM's own function."""
    tokens = 0
    while True:
        ids = torch.zeros(tokens + 1, top_k, dtype=torch.int32, device=device)
        config = {"BLOCK_SIZE_M": 16}
        try:
            order = fused_moe._prepare_expert_assignment(
                ids, config, tokens + 1, top_k, experts, None
            )[0]
        except TypeError:  # a version that is called in another way
            return 0
        if order is not None:
            return tokens
        tokens += 1


def repeat_hot_routes(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Real slots for kernels that compute every route; cold routes are -1 and have weight 0.

    A cold route gets the slot of one of its token's hot routes. Any other slot would do but for an
    expert whose values overflow on this token: infinity times 0 is NaN. Returns slots [T, k] and
    bool [T, 1]: the tokens with a hot route. The others' results are to be dropped.
    """
    hot = slots >= 0
    first = hot.to(torch.uint8).argmax(1, keepdim=True)
    own = slots.gather(1, first).clamp_min(0)
    return torch.where(hot, slots, own), hot.any(1, keepdim=True)
