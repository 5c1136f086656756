"""Checks the kernel that divides routes, against looking at each route."""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import torch

from kt_kernel.device.streaming.routes import divide_routes

E, K = 11, 3


class Kind(NamedTuple):
    """A batch, and how it is divided."""

    tokens: int
    ids_dtype: torch.dtype
    padding_dtype: torch.dtype | None
    cold_slot: int
    live: bool
    room: int


#: Of every kind, in an order of chance.
KINDS = [
    Kind(*values)
    for values in itertools.product(
        (0, 1, 100, 700),
        (torch.int32, torch.int64, torch.uint8),
        (None, torch.bool, torch.int64),
        (-1, 0),
        (False, True),
        (2, 8),
    )
]
random.Random(0).shuffle(KINDS)


def check(kernel: Any, kind: Kind, device: str, divide: Any = divide_routes) -> None:
    """Experts 1 and 8 are hot, 0, 3, 4, 7 and 9 are streamed, and so is 8 if experts are moving."""
    tokens, ids_dtype, padding_dtype, cold_slot, live, room = kind
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
    found = divide(
        kernel,
        ids.to(device),
        weights.to(device),
        slot_map.to(device),
        places.to(device),
        streamed=len(streamed),
        room=room,
        cold_slot=cold_slot,
        padding=padding if padding is None else padding.to(device),
        live=live,
    )
    hot_slots, hot_weights = (each.cpu() for each in found.hot)
    on_cpu = found.on_cpu.cpu()
    shares = [(slots.cpu(), weights.cpu()) for slots, weights in found.groups]
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
            assert (hot_slots[t, k].item(), hot_weights[t, k].item()) == want
            assert on_cpu[t, k].item() == (expert if place is None else -1)
            for number, (slots, parts) in enumerate(shares):
                want = (-1, 0.0)
                if place is not None and place // room == number:
                    want = (place % room, weight)
                assert (slots[t, k].item(), parts[t, k].item()) == want
