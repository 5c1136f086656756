"""A wrapper's calls by way of a device, here the CPU: what is remembered from one batch to the next
changes with all that it depends on."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from interpreted import Interpreter
from test_hand_over import LAYERS, H, K, batch, model, streams
from test_kernels import masks

from kt_kernel.device.engine import DeviceEngine
from kt_kernel.moe.placement import Placement
from kt_kernel.moe.routing import hot_routes

SLOT_MAP = torch.tensor([0, 1, -1, -1, -1, -1], dtype=torch.int32)


@pytest.fixture
def engine() -> Iterator[DeviceEngine]:
    made = DeviceEngine(Interpreter())
    yield made
    made.stop()


def on_device(engine: DeviceEngine, layers: list) -> list:
    for layer, way in zip(layers, streams(engine, layers), strict=True):
        layer._streams[torch.device("cpu")] = way
    return layers


def call(layer, one: tuple, slot_map: torch.Tensor = SLOT_MAP, cold_slot: int = 0) -> torch.Tensor:
    routes = layer.submit_and_split(*one, 0, slot_map=slot_map, cold_slot=cold_slot)
    for mine, theirs in zip(routes, hot_routes(*one[1:], slot_map, cold_slot), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    return layer.sync_and_add(one[0], 0)


@pytest.mark.parametrize("d", [0, 2])
def test_kinds_that_change(engine: DeviceEngine, d: int) -> None:
    layers, same = on_device(engine, model(d)), model(d)
    kinds = [
        (1, torch.int32, torch.float32),
        (5, torch.int32, torch.float32),
        (5, torch.int64, torch.float32),
        (5, torch.int64, torch.bfloat16),
        (9, torch.int32, torch.float32),
        (1, torch.int32, torch.float32),
    ]
    for number, (tokens, ids_dtype, weights_dtype) in enumerate((*kinds, *kinds[1:3])):
        for again in range(3):
            for i in range(LAYERS):
                x, ids, weights = batch(tokens, 100 * number + 10 * again + i)
                one = x, ids.to(ids_dtype), weights.to(weights_dtype)
                same[i].submit_forward(*one)
                want = same[i].sync_forward(x)
                assert torch.equal(call(layers[i], one), want), (number, again, i)


def test_splits_that_change(engine: DeviceEngine) -> None:
    [layer, *_] = on_device(engine, model())
    one = batch(4, 1)
    want = model()[0].forward(*one)
    other = torch.tensor([-1, 0, -1, 1, -1, 2], dtype=torch.int32)
    for slot_map, cold_slot in ((SLOT_MAP, 0), (SLOT_MAP, -1), (other, -1), (SLOT_MAP, 0)) * 2:
        for _ in range(3):
            assert torch.equal(call(layer, one, slot_map, cold_slot), want)
        assert torch.equal(layer.forward(*one, 0), want)  # without a split
    bad = SLOT_MAP.long()
    for _ in range(3):
        with pytest.raises(ValueError, match="layer 0: slot_map is"):
            layer.submit_and_split(*one, 0, slot_map=bad, cold_slot=0)
    assert torch.equal(call(layer, one), want)


@pytest.mark.parametrize("d", [0, 2])
def test_experts_that_move(engine: DeviceEngine, d: int) -> None:
    """The routes' map and the CPU's plan change between batches, after which plans are known."""
    layers = on_device(engine, model(d, hot=0))
    slots = (-1, 0, -1, 1, -1, 2), (2, 0, -1, -1, 1, -1), (-1,) * 6
    placements = [Placement(of_experts, 3) for of_experts in slots]
    slot_map = placements[-1].slot_map()
    seen = []
    for turn, placement in enumerate((*placements, placements[0])):
        same = model(d, hot=0)
        for layer in (*layers, *same):
            layer.set_gpu_experts_mask(placement.mask)
            assert torch.equal(layer.gpu_experts_mask, placement.mask)
        slot_map.copy_(placement.slot_map())
        for number in range(2):
            for i in range(LAYERS):
                one = batch(4, 10 * number + i)
                assert torch.equal(call(layers[i], one, slot_map, -1), same[i].forward(*one)), turn
        seen.append(call(layers[LAYERS - 1], batch(4, 1), slot_map, -1))
    assert torch.equal(seen[0], seen[3]) and not torch.equal(seen[0], seen[1])
    engine.backend.in_capture = True
    with pytest.raises(RuntimeError, match="layer 0: experts cannot move while a CUDA graph is c"):
        layers[0].set_gpu_experts_mask(placements[1].mask)
    engine.backend.in_capture = False
    assert torch.equal(layers[0].gpu_experts_mask, placements[0].mask)


def test_tensors_alike_of_other_strides(engine: DeviceEngine) -> None:
    """Or not aligned: what kernels cannot read is copied, however often the kind was seen."""
    [layer, *_] = on_device(engine, model())
    one = batch(4, 1)
    want = model()[0].forward(*one)
    odd = torch.zeros(4 * H + 1).bfloat16()
    odd[1:] = one[0].flatten()
    for turned in range(6):
        given = [t.t().contiguous().t() if i == turned % 3 else t for i, t in enumerate(one)]
        assert torch.equal(call(layer, one), want)
        assert torch.equal(call(layer, tuple(given)), want)
        assert torch.equal(call(layer, (odd[1:].view(4, H), *one[1:])), want)


def test_another_tensor_at_the_same_address(engine: DeviceEngine) -> None:
    [layer, *_] = on_device(engine, model())
    x, ids, weights = one = batch(4, 1)
    want = model()[0].forward(*one)
    for _ in range(2):
        call(layer, one)
        layer.submit_forward(*one, 0)
        with pytest.raises(ValueError, match=r"the pending result is \[4, 64\] torch.bfloat16"):
            layer.sync_and_add(x[:2], 0)
        with pytest.raises(ValueError, match=r"hidden_states is \[4, 64\] torch.float16 on cpu"):
            layer.sync_and_add(x.view(torch.float16), 0)
        with pytest.raises(ValueError, match=r"hidden_states must be \[..., 64\]"):
            layer.sync_and_add(x.view(2, 2 * H), 0)
        with pytest.raises(TypeError, match="hidden_states must be a tensor"):
            layer.sync_and_add(x.data_ptr(), 0)
        assert torch.equal(layer.sync_and_add(x.view(2, 2, H), 0), want)
        with pytest.raises(ValueError, match=r"topk_ids must be \[4, 3\]"):
            layer.submit_forward(x, ids[:2], weights, 0)


def test_captures_of_what_is_known(engine: DeviceEngine) -> None:
    """Routes of a graph lie in its own memory where no batch before had any."""
    [layer, *_] = on_device(engine, model())
    one, backend = batch(4, 1), engine.backend
    want = model()[0].forward(*one)
    for _ in range(2):
        layer.forward(*one, 0)
    layer.submit_forward(*one, 0)
    layer.sync_and_add(one[0], 0)
    with pytest.raises(RuntimeError, match="needs another kernel"):
        backend.in_capture = True
        call(layer, one)
    backend.in_capture = False
    launches = dict(engine.launches)
    other, *_ = on_device(engine, model())  # which compiles the kernel
    call(other, one)
    assert len(engine.launches) == len(launches) + 1
    backend.in_capture = True
    routes = [layer.submit_and_split(*one, 0, slot_map=SLOT_MAP, cold_slot=0) for _ in range(3)]
    assert len({ids.data_ptr() for ids, _ in routes}) == 3
    backend.in_capture = False
    assert torch.equal(call(layer, one), want)


def test_layers_that_go_and_come() -> None:
    layers = model(2)
    assert [layer._chain_place() for layer in layers] == [(0, K - 2), (1, K - 2), (2, K)]
    del layers[2]
    gc.collect()
    assert [layer._chain_place() for layer in layers] == [(0, K - 2), (1, K)]
    del layers[0]
    gc.collect()
    assert [layer._chain_place() for layer in layers] == [(0, K)]
    later = model(2)[0]
    layers[0]._chain.append(later, 9)
    assert layers[0]._chain_place() == (0, K - 2)


@pytest.mark.parametrize("d", [0, 2])
def test_padding_that_changes(engine: DeviceEngine, d: int) -> None:
    """It costs nothing, and rows that are none get what they get without those that are."""
    layers, same = on_device(engine, model(d)), model(d)
    for number, tokens in enumerate([4, 1, 20]):
        for turn, mask in enumerate([None, *masks(tokens).values(), None]):
            real = torch.ones(tokens, dtype=torch.bool)
            if mask is not None:
                real = ~mask if mask.dtype == torch.bool else mask >= 0
            for i in range(LAYERS):
                x, ids, weights = one = batch(tokens, 100 * number + 10 * turn + i)
                before = layers[i].stats()["expert_calls"], same[i].stats()["expert_calls"]
                # Where experts are deferred a row has to do with those beside it.
                same[i].submit_forward(x, ids.where(real[:, None], -1), weights)
                want = same[i].sync_forward(x)
                routes = layers[i].submit_and_split(
                    *one, 0, slot_map=SLOT_MAP, cold_slot=-1, padding=mask
                )
                theirs = hot_routes(*one[1:], SLOT_MAP, -1, mask)
                assert all(map(torch.equal, routes, theirs))
                assert (routes[0][~real] == -1).all() and not routes[1][~real].any()
                assert torch.equal(layers[i].sync_and_add(x, 0), want), (tokens, turn, i)
                if d == 0:
                    calls = [
                        layer.stats()["expert_calls"] - b
                        for layer, b in zip((layers[i], same[i]), before, strict=True)
                    ]
                    cold = int(((ids[real] >= 2) & (ids[real] < 6)).sum())
                    assert calls == [cold, cold]
                    alone = same[i].forward(x[real], ids[real], weights[real])
                    assert torch.equal(want[real], alone) and not want[~real].any()


def test_padding_of_a_batch_that_is_copied(engine: DeviceEngine) -> None:
    [layer, *_] = on_device(engine, model())
    x, ids, weights = batch(4, 1)
    mask = torch.tensor([3, -1, 0, -1])
    want = model()[0].forward(x, ids.where(mask[:, None] >= 0, -1), weights)
    for _ in range(2):
        turned = x.t().contiguous().t()
        layer.submit_and_split(
            turned, ids, weights, 0, slot_map=SLOT_MAP, cold_slot=0, padding=mask
        )
        assert torch.equal(layer.sync_and_add(turned, 0), want)


@pytest.mark.parametrize("way", ["device", "CPU"])
def test_padding_that_is_wrong(engine: DeviceEngine, way: str) -> None:
    [layer, *_] = on_device(engine, model()) if way == "device" else model()
    one = batch(4, 1)
    for padding, problem in (
        (
            torch.zeros(3).bool(),
            r"padding is \[3\] torch.bool .* on cpu; accepted: \[4\] torch.bool",
        ),
        (torch.zeros(4).int(), r"padding is \[4\] torch.int32 .* torch.bool or torch.int64"),
        (torch.zeros(4, 1).long(), r"padding is \[4, 1\] torch.int64"),
        (torch.zeros(8).long()[::2], r"padding is .* of strides \(2,\) .* contiguous"),
        (torch.zeros(4, dtype=torch.bool, device="meta"), "padding .* it is on meta"),
    ):
        with pytest.raises(ValueError, match=f"layer 0: {problem}"):
            layer.submit_and_split(*one, 0, slot_map=SLOT_MAP, cold_slot=0, padding=padding)
    with pytest.raises(TypeError, match="layer 0: padding must be a tensor, got int"):
        layer.submit_and_split(*one, 0, slot_map=SLOT_MAP, cold_slot=0, padding=3)
    with pytest.raises(RuntimeError, match="without submit_forward"):
        layer.sync_and_add(one[0], 0)


def test_padding_in_a_capture(engine: DeviceEngine) -> None:
    """Its kernels are compiled by a batch before, of the same kind of mask."""
    [layer, *_], backend = on_device(engine, model()), engine.backend
    one, slots = batch(4, 1), torch.tensor([1, 2, 3, -1])
    call(layer, one)
    for mask in (slots, slots < 0):
        given = dict(slot_map=SLOT_MAP, cold_slot=0, padding=mask)
        backend.in_capture = True
        with pytest.raises(RuntimeError, match="needs another kernel"):
            layer.submit_and_split(*one, 0, **given)
        backend.in_capture = False
        layer.submit_and_split(*one, 0, **given)
        want = layer.sync_and_add(one[0], 0).clone()
        backend.in_capture = True
        layer.submit_and_split(*one, 0, **given)
        assert torch.equal(layer.sync_and_add(one[0], 0), want)
        backend.in_capture = False
