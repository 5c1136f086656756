"""Divides a batch's routes between the engine's experts, the streamed ones, and the CPU."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .prepared import PreparedKernel

_BLOCK = 256  # routes of a program


class DividedRoutes(NamedTuple):
    """Routes [T, k] of a batch.

    Attributes:
        hot: (slots in the dtype of the ids, weights) of the hot experts; the slot of the other
            routes is ``cold_slot``, and their weight 0.
        on_cpu: ids without those of streamed experts, which are -1, in a signed type.
        groups: for each group of streamed experts, (slots in int32, weights); the slot of the other
            routes is -1, and their weight 0.
    """

    hot: tuple[torch.Tensor, torch.Tensor]
    on_cpu: torch.Tensor
    groups: list[tuple[torch.Tensor, torch.Tensor]]


def divide_routes(
    kernel: PreparedKernel,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    slot_map: torch.Tensor,
    places: torch.Tensor,
    *,
    streamed: int,
    room: int,
    cold_slot: int,
    padding: torch.Tensor | None = None,
    live: bool = False,
) -> DividedRoutes:
    """Divides the routes of a batch, with one launch on the current stream.

    Args:
        kernel: keeps the kernel from batch to batch.
        topk_ids: [T, k], any integer type. Other ids than 0 to E - 1 belong to no expert.
        topk_weights: [T, k].
        slot_map, places: int32 [E] on the same device: the slot of a hot expert, and the number of
            a streamed one; -1 for the others.
        streamed: how many experts are streamed. room: experts of a group, except for the last.
        cold_slot: see `moe.routing.hot_routes`. padding: rows without routes, see
            `moe.routing.need_padding`.
        live: an expert may be both hot and streamed, and is hot then.
    """
    from .routes_kernel import divide  # Triton may be missing

    ids, weights = topk_ids.contiguous(), topk_weights.contiguous()
    groups = -(-streamed // room)
    hot_slots, hot_weights = torch.empty_like(ids), torch.empty_like(weights)
    signed = ids.dtype if ids.dtype.is_signed else torch.int64
    on_cpu = torch.empty_like(ids, dtype=signed)
    group_slots = ids.new_empty((groups, *ids.shape), dtype=torch.int32)
    group_weights = weights.new_empty((groups, *ids.shape))
    if padding is not None and padding.dtype == torch.bool:
        padding = padding.view(torch.uint8)
    mask = None if padding is None else padding.dtype
    arguments = (
        *(ids, weights, ids if padding is None else padding, slot_map, places),
        *(hot_slots, hot_weights, on_cpu, group_slots, group_weights),
        *(ids.numel(), groups, room, cold_slot),
    )
    experts, top_k = slot_map.shape[0], ids.shape[1]
    if ids.numel():
        kernel.launch(
            divide,
            (-(-ids.numel() // _BLOCK), 1, 1),
            arguments,
            lambda: {
                "TOP_K": top_k,
                "EXPERTS": experts,
                "PADDED": mask is not None,
                "LIVE": live,
                "BLOCK": _BLOCK,
            },
            kind=(ids.dtype, weights.dtype, mask, experts, top_k, live),
            device=ids.device,
        )
    return DividedRoutes(
        (hot_slots, hot_weights), on_cpu, list(zip(group_slots, group_weights, strict=True))
    )
