"""A layer's packed experts as they are copied and unpacked, against the layer itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernels.unpacking import same_bits
from simulated_gpu import ImmediateLane, Pins

from kt_kernel import KTMoEWrapper
from kt_kernel.device.streaming.experts import PackedExperts
from kt_kernel.device.streaming.streamer import ExpertStreamer

pytest.importorskip("triton")

E, H, INNER = 5, 96, 160
HOT = (1, 3)


def layer(method: str, pools: int, hot: tuple[int, ...] = HOT) -> Any:
    mask = torch.zeros(E, dtype=torch.bool)
    mask[list(hot)] = True
    made = KTMoEWrapper(
        0, E, 2, H, INNER, mask, method=method, cpuinfer_threads=pools, threadpool_count=pools
    )
    g = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(E, INNER, H, generator=g).bfloat16() for _ in "gu")
    down = torch.randn(E, H, INNER, generator=g).bfloat16()
    made.load_weights_from_tensors(gate, up, down, torch.arange(E))
    return made


@pytest.mark.parametrize("pools", [1, 2])
@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "INT4_G32"])
def test_groups_have_the_layers_weights(method: str, pools: int) -> None:
    made = layer(method, pools)
    experts = made.packed_experts()
    assert experts.held == [0, 2, 4] and len(experts.parts) == pools
    two = 2 * (2 * experts.expert_bytes + 2 * experts.expert_values)
    streamer = ExpertStreamer(ImmediateLane(), two, experts)
    groups = [
        (group.slots, group.w13.clone(), group.w2.clone())
        for group in streamer.stream(experts, [4, 0, 2])
    ]
    assert [slots for slots, _, _ in groups] == [[0, 2], [4]]
    for slots, w13, w2 in groups:
        assert w13.shape == (2, 2 * INNER, H) and w2.shape == (2, H, INNER)  # also of one expert
        for i, slot in enumerate(slots):
            want = [torch.empty(*shape) for shape in ((INNER, H), (INNER, H), (H, INNER))]
            for matrix, to in enumerate(want):
                made._core.unpack(slot, matrix, to.numpy())
            gate, up, down = (weights.bfloat16() for weights in want)
            assert same_bits(w13[i], torch.cat([gate, up])) and same_bits(w2[i], down)


def test_neighbours_are_one_copy() -> None:
    experts = layer("AMXINT8", 1).packed_experts()
    runs = [[(r.at, r.to, r.count) for r in experts.runs(s)] for s in ([0, 2, 4], [0, 4], [2], [])]
    assert runs == [[(0, 0, 3)], [(0, 0, 1), (2, 1, 1)], [(1, 0, 1)], []]


def test_groups_in_the_order_of_memory() -> None:
    experts = layer("AMXINT8", 1).packed_experts()
    for slots, room, want in (
        ([4, 0, 2], 2, [([0, 2], 1), ([4], 1)]),
        ([4, 0, 2], 1, [([0], 1), ([2], 1), ([4], 1)]),
        ([4, 0], 2, [([0, 4], 2)]),
        ([], 2, []),
    ):
        for _ in range(2):  # the second time from memory
            found = experts.grouped(slots, room)
            assert [(group.slots, len(group.runs)) for group in found] == want


def test_experts_that_are_not_here() -> None:
    experts = layer("AMXINT8", 1).packed_experts()
    with pytest.raises(ValueError, match="expert 3 are not on the CPU"):
        experts.grouped([0, 3], 2)


def test_registration() -> None:
    made = layer("AMXINT8", 2)
    experts = made.packed_experts()
    pins = Pins(2)
    experts.register(pins)
    experts.register(pins)
    assert sum(pins.pinned.values()) == made.packed_bytes and len(pins.pinned) == 2
    experts.release()
    assert not pins.pinned
    experts.register(pins)
    del experts
    assert not pins.pinned
    few = Pins(1)
    with pytest.raises(RuntimeError, match="cannot be pinned"):
        made.packed_experts().register(few)
    assert not few.pinned


def test_weights_that_are_not_streamed() -> None:
    ordered: Any = SimpleNamespace(has_column_orders=True)
    form: Any = None
    with pytest.raises(ValueError, match="cannot be copied to a GPU: .*act-order"):
        PackedExperts(ordered, form, H, INNER)


def test_before_loading() -> None:
    with pytest.raises(RuntimeError, match="packed_experts before loading"):
        KTMoEWrapper(0, E, 2, H, INNER, method="AMXINT8", cpuinfer_threads=1).packed_experts()
