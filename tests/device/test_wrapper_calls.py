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

from kt_kernel.device.engine import DeviceEngine
from kt_kernel.routing import hot_routes

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
    return layer.sync_and_add(one[0], None, 0)


@pytest.mark.parametrize("d", [0, 2])
def test_kinds_that_change(engine: DeviceEngine, d: int) -> None:
    layers, same = on_device(engine, model(d)), model(d)
    kinds = [
        (1, torch.int32, torch.float32), (5, torch.int32, torch.float32),
        (5, torch.int64, torch.float32), (5, torch.int64, torch.bfloat16),
        (20, torch.int32, torch.float32), (1, torch.int32, torch.float32),
    ]  # fmt: skip
    for number, (tokens, ids_dtype, weights_dtype) in enumerate(kinds * 2):
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
            layer.sync_and_add(x[:2], None, 0)
        with pytest.raises(ValueError, match=r"hidden is \[4, 64\] torch.float16 on cpu"):
            layer.sync_and_add(x.view(torch.float16), None, 0)
        with pytest.raises(ValueError, match=r"hidden must be \[..., 64\]"):
            layer.sync_and_add(x.view(2, 2 * H), None, 0)
        with pytest.raises(TypeError, match="hidden must be a tensor"):
            layer.sync_and_add(x.data_ptr(), None, 0)
        assert torch.equal(layer.sync_and_add(x.view(2, 2, H), None, 0), want)
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
    layer.sync_and_add(one[0], None, 0)
    with pytest.raises(RuntimeError, match="of another kind"):
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
