"""The two kernels against torch, one by one, with the CPU's part played by the test."""

from __future__ import annotations

import pytest
import torch
from grid import grid

from kt_kernel.device import kernels
from kt_kernel.moe.routing import hot_routes

pytest.importorskip("triton")

ENTRIES = 1024


def hand_over(
    x,
    ids,
    weights,
    slot_map,
    cold_slot,
    programs,
    block,
    number=0,
    slot=5,
    head=None,
    padding=None,
    only_cold=False,
):
    """What one launch writes, by name."""
    tokens, k = ids.shape
    read = (
        padding.view(torch.uint8)
        if padding is not None and padding.dtype == torch.bool
        else (slot_map if padding is None else padding)
    )
    counter = torch.tensor([number], dtype=torch.int32)
    found = {
        "hot_ids": torch.full_like(ids, 77),
        "hot_weights": torch.full_like(weights, 7),
        "x": torch.full_like(x, 9),
        "ids": torch.full((tokens, k), 99, dtype=torch.int32),
        "weights": torch.full((tokens, k), 9.0),
        "tokens": torch.zeros(1, dtype=torch.int32),
        "cell": torch.zeros(2, dtype=torch.int32),
        "ring": torch.zeros(ENTRIES, dtype=torch.int64),
    }
    times = torch.full((6,), -1, dtype=torch.int64)
    done = torch.tensor([6, 1], dtype=torch.int32)  # and ready, as an earlier answer left them
    head = torch.tensor([number], dtype=torch.int32) if head is None else head
    kernels.hand_over[(programs,)](
        x,
        ids,
        weights,
        read,
        slot_map,
        found["hot_ids"],
        found["hot_weights"],
        found["x"],
        found["ids"],
        found["weights"],
        found["tokens"],
        times,
        done,
        found["cell"],
        counter,
        found["ring"],
        head,
        tokens,
        slot,
        HIDDEN=x.shape[1],
        TOP_K=k,
        EXPERTS=slot_map.shape[0],
        ENTRIES=ENTRIES,
        PADDED=padding is not None,
        SPLIT=cold_slot is not None,
        ONLY_COLD=only_cold,
        COLD_SLOT=cold_slot or 0,
        BLOCK=block,
        ROUTES=kernels.routes_with(-(-x.shape[1] // block), k),
        ROOM_CHECK=kernels.ROOM_CHECK,
        FENCE=False,
        TRACE=True,
    )
    assert times.tolist() == [0, 0, -1, -1, -1, -1]
    assert done.tolist() == [6, 0]
    return found | {"counter": counter}


def batch(tokens, hidden, k, experts, dtype, ids_dtype, weights_dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=g).to(dtype)
    ids = torch.randint(-2, experts + 3, (tokens, k), generator=g).to(ids_dtype)  # uint8: 254
    slot_map = torch.full((experts,), -1, dtype=torch.int32)
    hot = torch.randperm(experts, generator=g)[: experts // 2].sort().values
    slot_map[hot] = torch.arange(len(hot), dtype=torch.int32)
    return x, ids, torch.rand(tokens, k, generator=g).to(weights_dtype), slot_map


@grid(
    tokens=[1, 7, 100],
    # hidden, k, block, programs
    shape=[(64, 1, 64, 1), (100, 3, 32, 4), (96, 8, 128, 7), (257, 2, 512, 64), (32, 600, 16, 3)],
    # of x, ids and router weights, and the cold slot
    kind=[
        (torch.bfloat16, torch.int32, torch.float32, -1),
        (torch.float32, torch.int64, torch.bfloat16, None),
        (torch.float16, torch.int16, torch.float64, 0),
        (torch.bfloat16, torch.uint8, torch.float16, 0),
    ],
)
def test_hand_over(tokens, shape, kind) -> None:
    hidden, k, block, programs = shape
    dtype, ids_dtype, weights_dtype, cold_slot = kind
    experts = 10
    x, ids, weights, slot_map = batch(
        tokens, hidden, k, experts, dtype, ids_dtype, weights_dtype, seed=tokens
    )
    given = [t.clone() for t in (x, ids, weights, slot_map)]
    found = hand_over(x, ids, weights, slot_map, cold_slot, programs, block)
    assert all(torch.equal(a, b) for a, b in zip(given, (x, ids, weights, slot_map), strict=True))
    assert torch.equal(found["x"], x)
    known = (ids.long() >= 0) & (ids.long() < experts)
    assert torch.equal(found["ids"], torch.where(known, ids.long(), -1).int())
    assert torch.equal(found["weights"], weights.float())
    assert found["tokens"].item() == tokens
    assert found["cell"].tolist() == [0, 1] and found["counter"].item() == 1
    want = torch.zeros(ENTRIES, dtype=torch.int64)
    want[1] = (5 << 32) | 1
    assert torch.equal(found["ring"], want)
    if cold_slot is None:
        assert (found["hot_ids"] == 77).all() and (found["hot_weights"] == 7).all()
    else:
        slots, hot_weights = hot_routes(ids, weights, slot_map, cold_slot)
        assert found["hot_ids"].dtype == ids_dtype and torch.equal(found["hot_ids"], slots)
        assert torch.equal(found["hot_weights"], hot_weights)


@pytest.mark.parametrize(("tokens", "programs"), [(1, 1), (13, 4)])
def test_a_route_goes_to_one_side(tokens, programs) -> None:
    """With ONLY_COLD, the CPU gets what the device does not."""
    x, ids, weights, slot_map = batch(
        tokens, 64, 3, 10, torch.bfloat16, torch.int32, torch.float32, seed=1
    )
    found = hand_over(x, ids, weights, slot_map, -1, programs, 32, only_cold=True)
    assert torch.equal(found["hot_ids"], hot_routes(ids, weights, slot_map, -1)[0])
    known = (ids >= 0) & (ids < 10)
    cold = known & (found["hot_ids"] < 0)
    assert torch.equal(found["ids"], torch.where(cold, ids, -1))
    assert tokens == 1 or (cold.any() and (found["hot_ids"] >= 0).any())


def masks(tokens: int) -> dict[str, torch.Tensor]:
    """Of padding: what an engine gives, at the end, all rows or none, anywhere, not aligned."""
    g = torch.Generator().manual_seed(tokens)
    anywhere = torch.rand(tokens + 1, generator=g) < 0.5
    slots = torch.randint(0, 2**40, (tokens + 1,), generator=g)
    at_end = torch.arange(tokens) >= (tokens + 1) // 2
    return {
        "end": at_end,
        "all": torch.ones(tokens, dtype=torch.bool),
        "none": torch.zeros(tokens, dtype=torch.bool),
        "anywhere": anywhere[1:],
        "slots, end": torch.where(at_end, -1, slots[1:]),
        "slots, none": slots[1:],
        "slots, all": torch.full((tokens,), -1),
        "slots, anywhere": torch.where(anywhere, -(slots + 1), slots)[1:],
    }


@grid(
    tokens=[1, 13],
    # hidden, k, block, programs, cold slot
    shape=[(64, 1, 64, 1, None), (100, 3, 32, 4, 0), (32, 300, 16, 3, -1)],
    name=list(masks(1)),
)
def test_padding_is_routed_nowhere(tokens, shape, name) -> None:
    """All else is as without it."""
    hidden, k, block, programs, cold_slot = shape
    padding = masks(tokens)[name]
    rows = padding if padding.dtype == torch.bool else padding < 0
    given = batch(tokens, hidden, k, 10, torch.bfloat16, torch.int32, torch.float32, seed=tokens)
    kept = padding.clone()
    found = hand_over(*given, cold_slot, programs, block, padding=padding)
    want = hand_over(*given, cold_slot, programs, block)
    want["ids"][rows] = -1
    if cold_slot is not None:
        want["hot_ids"][rows], want["hot_weights"][rows] = cold_slot, 0
        routes = hot_routes(*given[1:], cold_slot, padding)
        assert torch.equal(found["hot_ids"], routes[0])
        assert torch.equal(found["hot_weights"], routes[1])
    for what, tensor in want.items():
        assert torch.equal(found[what], tensor), what
    assert torch.equal(padding, kept)


@pytest.mark.parametrize("number", [1, 2**31 - 2, 2**31 - 1, -2, -1, 1023, 1024])
def test_numbers_of_entries_wrap(number: int) -> None:
    """At 2**31 as int32, and round the ring; slot and number share 64 bits without mixing."""
    x, ids, weights, slot_map = batch(2, 16, 2, 4, torch.bfloat16, torch.int32, torch.float32)
    found = hand_over(x, ids, weights, slot_map, None, 2, 16, number=number, slot=2**31 - 1)
    mine = (number + 1) & 0xFFFFFFFF
    entry = int(found["ring"][mine % ENTRIES]) & (2**64 - 1)
    assert entry == ((2**31 - 1) << 32) | mine
    assert int(found["cell"][1]) & 0xFFFFFFFF == mine
    assert torch.count_nonzero(found["ring"]) == 1


@grid(
    tokens=[1, 3, 50],
    shape=[(64, 64, 1), (100, 32, 5), (257, 512, 64)],  # hidden, block, programs
    dtype=[torch.bfloat16, torch.float16, torch.float32],
    merge=[(False, 1.0), (True, 1.0), (True, 2.5)],  # whether hot sums are added, and their scale
)
def test_take_back(tokens, shape, dtype, merge) -> None:
    hidden, block, programs = shape
    add, scale = merge
    g = torch.Generator().manual_seed(tokens)
    cold = torch.randn(tokens, hidden, generator=g).to(dtype)
    hot = torch.randn(tokens, hidden, generator=g).to(dtype)
    want = ((cold.float() + (hot.float() if add else 0)) * scale).to(dtype)
    cell = torch.tensor([0, -3], dtype=torch.int32)
    done = torch.tensor([-3], dtype=torch.int32)
    times = torch.full((6,), -1, dtype=torch.int64)
    for out in (torch.empty_like(hot), hot.clone()):  # also over hot
        given = hot if out is not hot else out
        kernels.take_back[(programs,)](
            cold,
            times,
            done,
            cell,
            given,
            out,
            tokens,
            HIDDEN=hidden,
            ADD=add,
            SCALE=scale,
            BLOCK=block,
            FENCE=False,
            TRACE=True,
        )
        assert times.tolist() == [-1, -1, 2**32 - 3, 0, 0, 0]
        # The interpreter cuts bf16 off where a GPU rounds; tests/gpu compares bits.
        error = 2**-7 if dtype == torch.bfloat16 else 0
        assert ((out.float() - want.float()).abs() <= error * want.float().abs()).all()
