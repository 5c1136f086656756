"""The kernel that divides routes, in Triton's interpreter, against looking at each route."""

from __future__ import annotations

import pytest
import torch
from grid import grid

pytest.importorskip("triton")

from kt_kernel.device.streaming.prepared import PreparedKernel
from kt_kernel.device.streaming.routes import divide_routes

E, K = 11, 3


@grid(
    tokens=[0, 1, 100],
    ids_dtype=[torch.int32, torch.int64, torch.uint8],
    padding_dtype=[None, torch.bool, torch.int64],
    cold_slot=[-1, 0],
    live=[False, True],
    room=[2, 8],
)
def test_every_route_is_in_one_place(
    tokens: int,
    ids_dtype: torch.dtype,
    padding_dtype: torch.dtype | None,
    cold_slot: int,
    live: bool,
    room: int,
) -> None:
    """Experts 1 and 8 are hot, 0, 3, 4, 7 and 9 are streamed, and so is 8 if experts are moving."""
    g = torch.Generator().manual_seed(tokens)
    hot, streamed = [1, 8], [0, 3, 4, 7, 9, *[8] * live]
    slot_map, places = torch.full((2, E), -1, dtype=torch.int32)
    slot_map[hot] = torch.arange(2, dtype=torch.int32)
    places[streamed] = torch.arange(len(streamed), dtype=torch.int32)
    low = 0 if ids_dtype == torch.uint8 else -1
    ids = torch.randint(low, E + 1, (tokens, K), generator=g).to(ids_dtype)
    weights = torch.rand(tokens, K, generator=g)
    mask, padding = torch.rand(tokens, generator=g) < 0.3, None
    if padding_dtype is not None:
        padding = mask if padding_dtype == torch.bool else torch.where(mask, -1, 5)
    found = divide_routes(
        PreparedKernel(),
        ids,
        weights,
        slot_map,
        places,
        streamed=len(streamed),
        room=room,
        cold_slot=cold_slot,
        padding=padding,
        live=live,
    )
    groups = -(-len(streamed) // room)
    assert found.hot[0].dtype == ids_dtype and len(found.groups) == groups
    assert found.on_cpu.dtype == (ids_dtype if ids_dtype.is_signed else torch.int64)
    cold = torch.tensor(cold_slot).to(ids_dtype).item()
    for t in range(tokens):
        for k in range(K):
            expert, weight = ids[t, k].item(), weights[t, k].item()
            here = expert if padding is None or not mask[t] else E
            is_hot = here in hot
            place = streamed.index(here) if here in streamed and not is_hot else None
            want = (hot.index(here), weight) if is_hot else (cold, 0.0)
            assert (found.hot[0][t, k].item(), found.hot[1][t, k].item()) == want
            assert found.on_cpu[t, k].item() == (expert if place is None else -1)
            for number, (slots, shares) in enumerate(found.groups):
                want = (-1, 0.0)
                if place is not None and place // room == number:
                    want = (place % room, weight)
                assert (slots[t, k].item(), shares[t, k].item()) == want
