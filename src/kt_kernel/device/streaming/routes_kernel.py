"""The Triton kernel that divides a batch's routes between hot, streamed and CPU's experts."""

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["routes", "groups", "room", "cold_slot"],
    do_not_specialize_on_alignment=[
        "ids",
        "weights",
        "padding",
        "slot_map",
        "places",
        "hot_slots",
        "hot_weights",
        "cpu_ids",
        "group_slots",
        "group_weights",
    ],
)
def divide(
    ids,
    weights,
    padding,
    slot_map,
    places,
    hot_slots,
    hot_weights,
    cpu_ids,
    group_slots,
    group_weights,
    routes,
    groups,
    room,
    cold_slot,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    LIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes a batch's routes for the hot experts, for each group of streamed ones, and for the
    CPU; see `routes.divide_routes`. One program for each BLOCK routes."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < routes
    given = tl.load(ids + at, mask=inside, other=0)
    # int64 first, since an unsigned type cannot hold -1.
    wide = tl.cast(given, tl.int64)
    valid = inside & (wide >= 0) & (wide < EXPERTS)
    if PADDED:
        pads = tl.load(padding + at // TOP_K, mask=inside, other=0)
        valid = valid & ((pads >= 0) if padding.dtype.element_ty == tl.int64 else (pads == 0))
    expert = tl.where(valid, wide, 0)
    slot = tl.where(valid, tl.load(slot_map + expert), -1)
    place = tl.where(valid, tl.load(places + expert), -1)
    hot = slot >= 0
    if LIVE:
        place = tl.where(hot, -1, place)
    weight = tl.load(weights + at, mask=inside, other=0)
    nothing = tl.zeros_like(weight)
    tl.store(hot_slots + at, tl.where(hot, slot, cold_slot).to(given.dtype), mask=inside)
    tl.store(hot_weights + at, tl.where(hot, weight, nothing), mask=inside)
    tl.store(cpu_ids + at, tl.where(place >= 0, -1, wide).to(cpu_ids.dtype.element_ty), mask=inside)
    for group in range(groups):
        here = place - group * room
        mine = (here >= 0) & (here < room)
        to = tl.cast(group, tl.int64) * routes + at
        tl.store(group_slots + to, tl.where(mine, here, -1), mask=inside)
        tl.store(group_weights + to, tl.where(mine, weight, nothing), mask=inside)
