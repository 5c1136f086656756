"""Small tensor functions on routes: which to defer, and which the device computes.

None of them synchronises with the device or has shapes that depend on data, so they can be
captured.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..runtime.tensors import is_integer, need_dense, need_tensor

_UNSIGNED = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)


def select_deferred_experts(
    expert_ids: torch.Tensor, expert_scores: torch.Tensor, protected_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits the routes of a batch into immediate and deferred ones.

    For each token, the ``protected_k`` highest scores are protected (among equal scores, the
    earlier one). An expert that any token of the batch protects is immediate for all tokens,
    because its weights are read anyway.

    Args:
        expert_ids: [T, k], any integer dtype; not modified.
        expert_scores: [T, k], any float dtype; not modified.
        protected_k: routes protected per token; 0 or less defers all, k or more none.

    Returns:
        (immediate, deferred), each [T, k]: the ids, with -1 for the routes of the other set. The
            dtype is that of ``expert_ids``, or int64 if that is unsigned.

    Raises:
        TypeError: not tensors, or ``protected_k`` is not an integer.
        ValueError: shapes differ or are not [T, k], or ids are not integers.
    """
    need_tensor("expert_ids", expert_ids)
    need_tensor("expert_scores", expert_scores)
    try:
        protected_k = operator.index(protected_k)
    except TypeError:
        raise TypeError(
            f"protected_k must be an integer, got {type(protected_k).__name__}"
        ) from None
    if expert_ids.dim() != 2 or expert_ids.shape != expert_scores.shape:
        raise ValueError(
            "expert_ids and expert_scores must both be [T, k], got "
            f"{list(expert_ids.shape)} and {list(expert_scores.shape)}"
        )
    if not is_integer(expert_ids):
        raise ValueError(f"expert_ids must have an integer dtype, got {expert_ids.dtype}")
    ids = expert_ids.long() if expert_ids.dtype in _UNSIGNED else expert_ids
    k = ids.shape[1]
    nothing = torch.full_like(ids, -1)
    if protected_k <= 0:
        return nothing, ids.clone()
    if protected_k >= k:
        return ids.clone(), nothing
    order = torch.sort(expert_scores, dim=-1, descending=True, stable=True).indices
    protected = ids.gather(1, order[:, :protected_k])
    immediate = torch.isin(ids, protected)
    return torch.where(immediate, ids, nothing), torch.where(immediate, nothing, ids)


def need_padding(place: str, padding: Any, tokens: int, device: torch.device) -> None:
    """Checks a mask of padding rows. Errors begin with ``place``.

    The mask is [tokens] on the device, contiguous: bool, True for padding, or int64, negative for
    padding (an engine's mapping of tokens to KV cache slots). Raises TypeError if it is not a
    tensor, ValueError if it is not such a mask.
    """
    place = f"{place}: padding"
    need_tensor(place, padding)
    need_dense(place, padding)
    if (
        padding.dtype not in (torch.bool, torch.int64)
        or padding.device != device
        or padding.shape != (tokens,)
        or not padding.is_contiguous()
    ):
        raise ValueError(
            f"{place} is {list(padding.shape)} {padding.dtype} of strides {padding.stride()} on "
            f"{padding.device}; accepted: [{tokens}] torch.bool or torch.int64, contiguous, on "
            f"{device}"
        )


def without_padding(topk_ids: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
    """topk_ids [..., k] as int64, -1 in padding rows, see `need_padding`."""
    ids = topk_ids.long()
    if padding is None:
        return ids
    rows = padding if padding.dtype == torch.bool else padding < 0
    return ids.masked_fill(rows.to(ids.device).reshape(*ids.shape[:-1], 1), -1)


def hot_routes(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    slot_map: torch.Tensor,
    cold_slot: int,
    padding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewrites routes for a device kernel that holds only the hot experts.

    Args:
        topk_ids: [T, k] global expert ids, any signed integer dtype. Ids outside 0 … E-1 count
            as cold.
        topk_weights: [T, k] router weights.
        slot_map: [E] on the same device: the device slot of a hot expert, -1 for a cold one.
        cold_slot: the slot of a cold route: -1 if the kernel skips it, 0 if every route must have a
            real slot (with weight 0).
        padding: rows whose routes all count as cold, see `need_padding`.

    Returns:
        (slots [T, k] in the dtype of ``topk_ids``, weights [T, k] with cold routes at 0).
    """
    slots, cold = _slots_of(topk_ids, slot_map, padding)
    slots = slots.masked_fill(cold, cold_slot).to(topk_ids.dtype)
    return slots, topk_weights.masked_fill(cold, 0)


def split_routes(
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    slot_map: torch.Tensor,
    cold_slot: int,
    padding: torch.Tensor | None = None,
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """`hot_routes`, and the ids of the remaining routes: int64 [T, k], -1 for hot ones. The map is
    read once, so each route is in exactly one of the two."""
    slots, cold = _slots_of(topk_ids, slot_map, padding)
    hot = slots.masked_fill(cold, cold_slot).to(topk_ids.dtype), topk_weights.masked_fill(cold, 0)
    return hot, topk_ids.long().masked_fill(~cold, -1)


def _slots_of(
    topk_ids: torch.Tensor, slot_map: torch.Tensor, padding: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots of routes, int64 [T, k], and which of them are cold."""
    experts = slot_map.shape[0]
    ids = without_padding(topk_ids, padding)
    valid = (ids >= 0) & (ids < experts)
    slots = slot_map[ids.clamp(0, max(experts - 1, 0))].long()
    return slots, ~valid | (slots < 0)
