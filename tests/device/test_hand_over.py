"""The hand-over from end to end on the CPU: the kernels under Triton's interpreter, the compiled
core's thread, and the layer. What the GPU adds is in tests/gpu."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from interpreted import Interpreter, at

from kt_kernel import KTMoEWrapper, model_scope
from kt_kernel.device.engine import DeviceEngine, engine_of, watchdog_seconds
from kt_kernel.device.layer import LayerStream
from kt_kernel.moe import buffers
from kt_kernel.moe.routing import hot_routes

E, K, H, INNER, LAYERS = 6, 3, 64, 32, 3


@pytest.fixture
def engine() -> Iterator[DeviceEngine]:
    made = DeviceEngine(Interpreter())
    yield made
    made.stop()


def model(d: int = 0, seed: int = 0, hot: int = 2) -> list:
    g = torch.Generator().manual_seed(seed)
    layers = []
    with model_scope():
        for layer in range(LAYERS):
            made = KTMoEWrapper(
                layer,
                E,
                K,
                H,
                INNER,
                num_gpu_experts=hot,
                cpuinfer_threads=2,
                method="BF16",
                max_deferred_experts_per_token=d,
            )
            gate, up = (torch.randn(E, INNER, H, generator=g) * H**-0.5 for _ in range(2))
            down = torch.randn(E, H, INNER, generator=g) * INNER**-0.5
            made.load_weights_from_tensors(gate, up, down, torch.arange(E))
            layers.append(made)
    return layers


def streams(engine: DeviceEngine, layers: list, smallest: int = 8) -> list[LayerStream]:
    return [
        LayerStream(
            engine,
            layer._core,
            layer._settings.where,
            layer._chain,
            experts=E,
            hidden=H,
            top_k=K,
            smallest=smallest,
        )
        for layer in layers
    ]


def batch(tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> tuple:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, H, generator=g).to(dtype),
        torch.randint(-1, E + 1, (tokens, K), generator=g).int(),
        torch.rand(tokens, K, generator=g),
    )


def expected(layers: list, batches: list) -> list[torch.Tensor]:
    """The path without a device."""
    out = []
    for layer, one in zip(layers, batches, strict=True):
        layer.submit_forward(*one)
        out.append(layer.sync_forward(one[0]))
    return out


def submit(stream: LayerStream, layer, one: tuple, d: int = 0, split=None):
    return stream.submit(
        *one, one[0].shape[0], 0, layer._chain_place(), deferring=d > 0, split=split
    )


def test_the_map_alone_divides_the_routes(engine: DeviceEngine) -> None:
    """The CPU has all experts, and gets those that the map does not have; the map changes between
    batches."""
    layer = model(hot=0)[0]
    way = streams(engine, [layer])[0]
    slot_map = torch.full((E,), -1, dtype=torch.int32)
    for number in range(6):
        if number == 1:  # plans of earlier batches are not used any more
            way.hand_over_only_cold()
        one = batch(5, number)
        slot_map.copy_(torch.randint(-1, 2, (E,), generator=torch.Generator().manual_seed(number)))
        kinds = slot_map  # any object
        handed, routes = way.submit(
            *one, 5, 0, layer._chain_place(), deferring=False, split=(slot_map, -1), kinds=kinds
        )
        assert routes is not None
        ids = one[1].clone()
        if number:
            ids[routes[0] >= 0] = -1
            assert (routes[0] >= 0).any() and (ids >= 0).any()
        layer.submit_forward(one[0], ids, one[2])
        assert torch.equal(handed.collect(0), layer.sync_forward(one[0])), number


@pytest.mark.parametrize("d", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equals_the_path_without_a_device(engine: DeviceEngine, d: int, dtype: torch.dtype) -> None:
    """Bit for bit, over layers that defer, batch sizes that change, and several passes."""
    layers, same = model(d), model(d)
    ways = streams(engine, layers)
    for number, tokens in enumerate([1, 5, 1, 20, 8, 1]):  # 20: a bank of its own
        batches = [batch(tokens, 10 * number + i, dtype) for i in range(LAYERS)]
        want = expected(same, batches)
        for layer, way, one, y in zip(layers, ways, batches, want, strict=True):
            handed, _ = submit(way, layer, one, d)
            assert torch.equal(handed.collect(0), y), (number, tokens)
    assert engine.core.pending() == 0


def test_adds_the_experts_of_the_device(engine: DeviceEngine) -> None:
    layer, slot_map = model()[0], torch.tensor([0, 1, -1, -1, -1, -1], dtype=torch.int32)
    [way] = streams(engine, [layer])
    one = batch(4, 1)
    handed, routes = submit(way, layer, one, split=(slot_map, -1))
    for mine, wanted in zip(routes, hot_routes(one[1], one[2], slot_map, -1), strict=True):
        assert torch.equal(mine, wanted)
    hot = torch.randn(4, H).bfloat16()
    cold = layer.forward(*one)
    want = ((hot.float() + cold.float()) * 0.5).bfloat16()
    total = handed.collect_and_add(hot, 0, 0.5)
    assert total.data_ptr() == hot.data_ptr()
    # The interpreter cuts bf16 off where a GPU rounds.
    assert ((total.float() - want.float()).abs() <= 2**-7 * want.float().abs()).all()
    handed, _ = submit(way, layer, one)
    alone = handed.collect_and_add(None, 0, 1.0)
    assert torch.equal(alone, cold)
    with pytest.raises(ValueError, match=r"hot is \[4, 3\]"):
        handed.collect_and_add(torch.zeros(4, 3).bfloat16(), 0, 1.0)


def test_inputs_that_kernels_cannot_read_are_copied(engine: DeviceEngine) -> None:
    """Transposed, cut out of something wider, not aligned, of a float type without arithmetic."""
    layer, same = model()[0], model()[0]
    [way] = streams(engine, [layer])
    x, ids, weights = batch(4, 1)
    wide = torch.zeros(4, H + 1).bfloat16()
    wide[:, 1:] = x
    odd = torch.zeros(4 * H + 1).bfloat16()
    odd[1:] = x.flatten()
    few = weights.to(torch.float8_e5m2)
    for one in (
        (x.t().contiguous().t(), ids, weights),
        (x, ids.t().contiguous().t(), weights.t().contiguous().t()),
        (wide[:, 1:], ids, weights),
        (odd[1:].view(4, H), ids, weights),
        (x.view(2, 2, H), ids, weights),
        (x.clone().requires_grad_(), ids, weights),
        (x, ids, few),
    ):
        handed, _ = way.submit(*one, 4, 0, layer._chain_place(), deferring=False)
        want = same.forward(x, ids, one[2].float())
        assert torch.equal(handed.collect(0), want), [t.stride() for t in one]
    hot = torch.randn(H, 4).bfloat16().t()
    total = submit(way, layer, (x, ids, weights))[0].collect_and_add(hot, 0, 1.0)
    want = (hot.float() + same.forward(x, ids, weights).float()).bfloat16()
    assert ((total.float() - want.float()).abs() <= 2**-7 * want.float().abs()).all()


def test_two_submits_may_wait(engine: DeviceEngine) -> None:
    """Of one layer: a result is valid until the next submit but one."""
    layer, same = model()[0], model()[0]
    [way] = streams(engine, [layer])
    first, second = batch(3, 1), batch(3, 2)
    waiting = [submit(way, layer, one)[0] for one in (first, second)]
    found = [handed.collect(0) for handed in waiting]
    for y, one in zip(found, (first, second), strict=True):
        assert torch.equal(y, same.forward(*one))


def test_a_third_submit_takes_the_first_ones_buffers(engine: DeviceEngine) -> None:
    layer = model()[0]
    [way] = streams(engine, [layer])
    waiting = [submit(way, layer, batch(3, i))[0] for i in range(3)]
    with pytest.raises(RuntimeError, match="layer 0: a later batch already uses the buffers"):
        waiting[0].collect(0)
    with pytest.raises(RuntimeError, match="at most two batches per model"):
        waiting[0].collect_and_add(None, 0, 1.0)
    for handed in waiting[1:]:
        handed.collect(0)


def test_one_batch_waits_where_experts_are_deferred(engine: DeviceEngine) -> None:
    """The next layer but one writes where the first one's deferred experts may still be read, if
    the layer between them was not waited for."""
    layers = model(2)
    ways = streams(engine, layers)
    submit(ways[0], layers[0], batch(4, 0), 2)[0].collect(0)
    between, _ = submit(ways[1], layers[1], batch(4, 1), 2)
    last, _ = submit(ways[2], layers[2], batch(4, 2), 2)
    with pytest.raises(RuntimeError, match="layer 1: .* one if experts are deferred"):
        between.collect(0)
    last.collect(0)


def test_other_streams_wait(engine: DeviceEngine) -> None:
    """For the hand-over, and for what another stream still does with the buffers."""
    layer = model()[0]
    [way] = streams(engine, [layer])
    handed, _ = submit(way, layer, batch(3, 0))
    assert engine.backend.synchronized == 0
    handed.collect(5)
    assert engine.backend.synchronized == 1
    for stream, count in ((0, 1), (5, 2), (5, 2), (0, 3)):
        way.submit(*batch(3, 0), 3, stream, layer._chain_place(), deferring=False)
        assert engine.backend.synchronized == count, stream


def test_results_are_kept_by_size(engine: DeviceEngine) -> None:
    """Valid until the next but one of as many tokens, whatever other sizes come between."""
    layer, same = model()[0], model()[0]
    [way] = streams(engine, [layer])
    first = submit(way, layer, batch(1, 0))[0].collect(0)
    for i in range(4):
        submit(way, layer, batch(2 + i % 2, i))[0].collect(0)
    assert torch.equal(first, same.forward(*batch(1, 0)))
    address = first.data_ptr()
    own = [submit(way, layer, batch(1, i))[0].collect(0).data_ptr() for i in range(4)]
    assert own[0] != own[1] and own[:2] == own[2:]
    del first, address


def test_results_outlive_their_model(engine: DeviceEngine) -> None:
    first, second = model(seed=1)[0], model(seed=2)[0]
    [way] = streams(engine, [first])
    y = submit(way, first, batch(3, 0))[0].collect(0)
    want = y.clone()
    way.close()
    del first, way
    gc.collect()
    [way] = streams(engine, [second])
    for i in range(4):
        submit(way, second, batch(3, i))[0].collect(0)
    assert torch.equal(y, want)


def test_errors_of_the_cpu_are_raised_by_the_next_call(engine: DeviceEngine) -> None:
    layer = model()[0]
    [way] = streams(engine, [layer])
    handed, _ = submit(way, layer, batch(3, 0))
    engine.core.drain(10)
    engine.counter += 1
    words = at(engine.core.ring_address, torch.int64, engine.core.entries)
    words[2] = (999 << 32) | 2  # a slot that does not exist
    engine.core.drain(10)
    with pytest.raises(RuntimeError, match="names slot 999, which does not exist"):
        handed.collect(0)
    handed.collect(0)
    engine.stop()
    with pytest.raises(RuntimeError, match="the stream engine was stopped"):
        submit(way, layer, batch(3, 0))


def test_slot_maps_and_sums_of_another_kind(engine: DeviceEngine) -> None:
    layer = model()[0]
    [way] = streams(engine, [layer])
    good = torch.tensor([0, 1, -1, -1, -1, -1], dtype=torch.int32)
    for bad in (good.long(), good[:5], good.repeat_interleave(2)[::2], good.to("meta")):
        with pytest.raises(ValueError, match=r"layer 0: slot_map is \[\d\] torch\.int.*; expected"):
            submit(way, layer, batch(3, 0), split=(bad, 0))
    handed, _ = submit(way, layer, batch(3, 0), split=(good, 0))
    for hot in (torch.zeros(3, H), torch.zeros(3, H, device="meta").bfloat16()):
        with pytest.raises(ValueError, match="layer 0: hot is"):
            handed.collect_and_add(hot, 0, 1.0)


@pytest.mark.parametrize("d", [0, 2])
def test_a_pass_that_ended_early_leaves_nothing(engine: DeviceEngine, d: int) -> None:
    layers, same = model(d), model(d)
    ways = streams(engine, layers)
    for stop in (1, 2, 1, 2):
        for i in range(stop):
            submit(ways[i], layers[i], batch(4, i), d)  # nobody collects
    batches = [batch(4, 50 + i) for i in range(LAYERS)]
    for layer, way, one, y in zip(layers, ways, batches, expected(same, batches), strict=True):
        handed, _ = submit(way, layer, one, d)
        assert torch.equal(handed.collect(0), y)


def test_two_models(engine: DeviceEngine) -> None:
    """Their passes in turns, layer by layer; neither gets what the other deferred."""
    models = [model(2, seed) for seed in (1, 2)]
    same = [model(2, seed) for seed in (1, 2)]
    ways = [streams(engine, layers) for layers in models]
    for tokens in (2, 7):
        batches = [[batch(tokens, 10 * m + i) for i in range(LAYERS)] for m in range(2)]
        want = [expected(s, b) for s, b in zip(same, batches, strict=True)]
        for i in range(LAYERS):
            handed = [submit(ways[m][i], models[m][i], batches[m][i], 2)[0] for m in range(2)]
            for m in range(2):
                assert torch.equal(handed[m].collect(0), want[m][i])


def test_capture_needs_what_is_there_already(engine: DeviceEngine) -> None:
    layer = model()[0]
    [way] = streams(engine, [layer])
    backend = engine.backend
    backend.in_capture = True
    with pytest.raises(RuntimeError, match="4 tokens is captured .* run a batch of that size once"):
        submit(way, layer, batch(4, 0))
    backend.in_capture = False
    handed, _ = submit(way, layer, batch(4, 0))
    backend.in_capture = True
    with pytest.raises(RuntimeError, match="collect a batch of that size once"):
        handed.collect(0)
    with pytest.raises(RuntimeError, match="needs another kernel"):
        handed.collect_and_add(None, 0, 2.0)
    backend.in_capture = False
    handed.collect(0)
    submit(way, layer, batch(7, 1))[0].collect(0)
    compiled = backend.compiled
    backend.in_capture = True
    handed, _ = submit(way, layer, batch(7, 1))
    handed.collect(0)
    assert backend.compiled == compiled
    with pytest.raises(RuntimeError, match="must be collected on the stream that it was submitted"):
        submit(way, layer, batch(7, 1))[0].collect(5)


def test_memory_comes_back_unless_a_graph_has_it(engine: DeviceEngine) -> None:
    backend = engine.backend
    own = set(backend.pinned)
    for captured in (False, True):
        layer = model()[0]
        [way] = streams(engine, [layer])
        result = weakref.ref(submit(way, layer, batch(4, 0))[0].collect(0))
        if captured:
            backend.in_capture = True
            submit(way, layer, batch(4, 0))[0].collect(0)
            backend.in_capture = False
            kept = weakref.ref(way._slots[next(iter(way._slots))].bank)
        assert len(backend.pinned) == len(own) + 2
        assert engine.clear() == 0  # in use
        way.close()
        del way, layer
        gc.collect()
        freed = engine.clear()
        assert (freed == 0) == captured
        assert (backend.pinned == own) == (not captured)
        buffers.clear_buffer_cache()
        assert (result() is None) == (not captured)
    assert kept() is not None


def test_banks_serve_the_next_model(engine: DeviceEngine) -> None:
    for _ in range(3):
        layer = model()[0]
        [way] = streams(engine, [layer])
        submit(way, layer, batch(4, 0))[0].collect(0)
        way.close()
        del way, layer
        gc.collect()
    assert len(engine.backend.pinned) == 1 + 2


def test_a_stream_waits_for_the_answer(engine: DeviceEngine) -> None:
    """Until the ready word is set. Then `done` decides, since the word may have been set by the
    answer to an earlier batch on the same side, which nobody collected."""
    layers, same = model()[:1], model()[:1]
    [way] = streams(engine, layers)
    batches = [batch(4, seed) for seed in range(4)]
    want = [expected(same, [one])[0] for one in batches]
    assert engine.waits
    handed = [submit(way, layers[0], one)[0] for one in batches]
    for side in handed[-1].plan.bank.sides:
        words = at(side.core.done_address, torch.int32, 2)
        assert side.core.ready_address == side.core.done_address + 4
        engine.core.drain(10)
        assert words[1] == 1
    for one, y in zip(handed[2:], want[2:], strict=True):
        assert torch.equal(one.collect(0), y)


def test_a_stream_that_cannot_wait(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """The kernels wait instead, with a warning; results are the same."""

    def refuse(self: Interpreter, address: int, value: int) -> None:
        raise RuntimeError("cuStreamWaitValue32 failed: CUDA_ERROR_NOT_SUPPORTED")

    monkeypatch.setattr(Interpreter, "wait", refuse)
    engine = DeviceEngine(Interpreter())
    assert not engine.waits and "streams cannot wait for the CPU" in caplog.text
    layers = model()[:1]
    [way] = streams(engine, layers)
    one = batch(4, 0)
    handed, _ = submit(way, layers[0], one)
    assert torch.equal(handed.collect(0), expected(layers, [one])[0])
    engine.stop()


def test_a_graph_that_outlives_its_layer_gets_zeros_and_an_error(engine: DeviceEngine) -> None:
    layers = model()[:2]
    ways = streams(engine, layers)
    way = ways[0]
    handed, _ = submit(way, layers[0], batch(4, 0))
    handed.collect(0)
    [slot] = {slot.number for slot in way._slots.values()}
    launch = way._hand_over(torch.bfloat16, torch.int32, torch.float32, None, None, False)
    engine.backend.in_capture = True
    handed, _ = submit(way, layers[0], batch(4, 1))
    handed.collect(0)
    engine.backend.in_capture = False
    side = handed.plan.side
    slot = way._slots[handed.plan.bank, handed.plan.bank.sides.index(side), (0, K)].number
    way.close()
    one = batch(4, 3)
    unused = engine.counter.data_ptr()
    launch.run(
        1,
        0,
        *(t.data_ptr() for t in one),
        *[unused] * 4,
        *side.inputs,
        unused,
        engine.core.ring_address,
        engine.core.head_address,
        4,
        slot,
        0,
        0,
    )
    out = torch.ones(4, H).bfloat16()
    way.take_back(handed, out, 0, False)
    assert not out.any()
    with pytest.raises(RuntimeError, match="layer 0.* was freed, but a CUDA graph still calls it"):
        submit(ways[1], layers[1], batch(4, 0))
    handed, _ = submit(ways[1], layers[1], batch(4, 0))  # raised once
    handed.collect(0)


def test_too_many_threads_are_told_once(engine: DeviceEngine, caplog, monkeypatch) -> None:
    for module in ("runtime.pools", "device.engine"):
        monkeypatch.setattr(f"kt_kernel.{module}.usable_cores", lambda: 16)
    monkeypatch.setattr("kt_kernel.runtime.pools._logged", False)
    engine.warn_of_threads(13)
    assert not caplog.records
    for _ in range(2):
        engine.warn_of_threads(14)
    [record] = caplog.records
    assert "14 CPU threads on 16 usable cores leave too few" in record.getMessage()
    assert "at most 13 with --kt-cpuinfer" in record.getMessage()


def test_the_first_batch_of_all_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    capturing = Interpreter()
    capturing.in_capture = True
    monkeypatch.setattr("kt_kernel.device.backend.CudaBackend", lambda device: capturing)
    monkeypatch.setattr("kt_kernel.device.engine._engines", {})
    with pytest.raises(RuntimeError, match="cuda:99: the very first batch is captured"):
        engine_of(torch.device("cuda", 99))
    capturing.in_capture = False
    made = engine_of(torch.device("cuda", 99))
    assert made is engine_of(torch.device("cuda", 99)) is not None
    made.stop()


def test_a_device_that_cannot(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """Says why, once; batches are copied then."""

    class Refuses(Interpreter):
        def pin(self, buffer) -> None:
            raise RuntimeError("0.1 MB of host memory cannot be pinned: out of memory")

    device = torch.device("cuda", 99)
    monkeypatch.setattr("kt_kernel.device.backend.CudaBackend", lambda device: Refuses())
    monkeypatch.setattr("kt_kernel.device.engine._engines", {})
    assert engine_of(device) is None and engine_of(device) is None
    [record] = caplog.records
    assert "cuda:99: cannot use pinned memory (0.1 MB of host" in record.getMessage()


@pytest.mark.parametrize("bad", ["x", "0", "-1", "inf", "nan"])
def test_watchdog_seconds(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_WATCHDOG_SECONDS", bad)
    with pytest.raises(ValueError, match=f"KT_WATCHDOG_SECONDS={bad}"):
        watchdog_seconds()
    monkeypatch.setenv("KT_WATCHDOG_SECONDS", "2.5")
    assert watchdog_seconds() == 2.5
