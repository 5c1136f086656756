"""The live expert cache: every expert of every token is computed once, whatever moves meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cached_model import (
    CPU,
    LAYERS,
    SLOTS,
    E,
    InstantUploads,
    K,
    answer,
    batch,
    check_sums,
    make,
    random_weights,
    started,
)
from grid import examples
from simulated_gpu import ImmediateLane, hot_products, products

from kt_kernel import KTMoEWrapper
from kt_kernel.device.slots import DenseSlots
from kt_kernel.device.streaming.rates import Rates
from kt_kernel.device.streaming.streamer import ExpertStreamer
from kt_kernel.moe.placement import Placement
from kt_kernel.runtime.text import shown_size
from kt_kernel.serving import cache as caches
from kt_kernel.serving import cache_start
from kt_kernel.serving.cache_slots import LayerSlots
from kt_kernel.serving.hot_packed import packed_hot
from kt_kernel.serving.hot_weights import HotShape
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.serving.option_table import AUTO, OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.streaming import ModelStreaming
from kt_kernel.testing import row_error
from kt_kernel.weights.expert_tensors import MATRICES


@pytest.fixture(scope="module")
def weights() -> list[dict[str, torch.Tensor]]:
    return random_weights()


@pytest.mark.parametrize(
    ("where", "method", "hot_format"),
    [
        ("host", "INT4_G32", "engine"),
        ("host", "BF16", "engine"),
        ("simulated_gpu", "INT4_G32", "engine"),
        ("simulated_gpu", "BF16", "engine"),
        ("simulated_gpu", "INT4_G32", "packed"),
        ("simulated_gpu", "MOE_INT8", "packed"),
    ],
)
def test_experts_move_at_every_batch_and_nothing_changes(
    weights, restless, where: str, method: str, hot_format: str, request: pytest.FixtureRequest
) -> None:
    """The same sums as with all experts cold: hot ones have the CPU's weights. A lost or a doubled
    expert would be seen."""
    if where != "host":
        request.getfixturevalue(where)
    model, engine = make(weights, method=method, hot_format=hot_format)
    cold, _ = make(weights, method=method, num_gpu_experts=0, enable_dynamic_expert_update="off")
    cache = started(model)
    placements = set()
    most = 0.05 if method == "MOE_INT8" else 0.02  # the CPU quantises activations, too
    steps = 30 if where == "host" else examples(12, full=30)  # an interpreter runs its kernels
    for number in range(steps):
        inputs = batch(number)
        check_sums(model, cold, engine, inputs, most)
        placements.add(model.layers[0].current_placement)
    assert len(placements) > steps // 3 and cache.counters.cache_uploads > steps // 2
    # One of a token's two experts lost, or computed twice.
    x, ids, router = batch(1)
    layer, held = model.layers[0], engine[0]
    want = answer(layer, held, x, ids, router)[0].double()
    for factor in (0, 2):
        wrong = router.clone()
        wrong[0, 0] *= factor
        assert row_error(answer(layer, held, x, ids, wrong)[0].double(), want).max() > 0.1


def test_each_route_is_computed_once(weights, restless) -> None:
    """By the counters: what the CPU computed, and what the engine got, is everything."""
    model, engine = make(weights)
    cache = started(model)
    layer, held, hot, real = model.layers[0], engine[0], 0, 0
    before = layer.stats()["tokens"], layer.wrapper.stats()["expert_calls"]
    for number in range(20):
        x, ids, router = batch(3 * number)  # one token
        slots, weights_ = layer.submit(x, ids, router, cold_slot=-1)
        known = (ids >= 0) & (ids < E)
        assert ((slots >= 0) <= known).all() and (weights_[slots < 0] == 0).all()
        hot += int((slots >= 0).sum())
        real += int(known.sum())
        layer.collect(x, hot_products(x, slots, weights_, *held))
    cold = layer.wrapper.stats()["expert_calls"] - before[1]
    assert hot + cold == real and hot and cold
    cache.step()
    stats = model.stats()
    assert stats["cache_hits"] == hot and stats["cache_misses"] == cold
    assert stats["cache_uploads"] and stats["cache_uploads"] >= stats["cache_evictions"] - SLOTS


def test_a_thread_moves_experts_meanwhile(weights, restless, monkeypatch) -> None:
    """As with a GPU: at any moment of a batch. The sums stay the same, and the thread ends with the
    model."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(caches, "TICK_SECONDS", 1e-4)
    monkeypatch.setattr(caches, "_OFTEN_SECONDS", 1e-4)
    model, engine = make(weights, method="BF16")
    cold, _ = make(weights, method="BF16", num_gpu_experts=0, enable_dynamic_expert_update="off")
    cache = started(model)
    cache._thread = thread = threading.Thread(target=cache._run)
    thread.start()
    try:
        for number in range(150):
            inputs = batch(number)
            # The thread has several looks meanwhile.
            check_sums(model, cold, engine, inputs, pause=2e-3)
        assert thread.is_alive() and cache.counters.cache_uploads > 100
    finally:
        del model
        gc.collect()
        thread.join(5)
    assert not thread.is_alive() and cache not in caches._caches


@pytest.mark.parametrize("failing", [0, 6])
def test_an_error_of_the_driver(
    weights, restless, simulated_gpu, driver: str, monkeypatch, caplog, failing: int
) -> None:
    """Experts no longer move, and what is served stays right, at whatever call it comes."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    model, engine = make(weights, method="BF16")
    cold, _ = make(weights, method="BF16", num_gpu_experts=0, enable_dynamic_expert_update="off")
    cache, state = started(model), ctypes.CDLL(driver)
    cache._began = False  # batches do not look
    called, at = (ctypes.c_int.in_dll(state, name) for name in ("called", "failing"))
    called.value, at.value = 0, failing
    try:
        for number in range(8):  # a look each, until the error comes
            check_sums(model, cold, engine, batch(number))
            monkeypatch.setattr(cache, "_sleep", lambda *given: cache._stop.set())
            cache._stop.clear()
            cache._passed, cache._wait = -1, 0.0
            cache._run()
            if "experts no longer move" in caplog.text:
                break
    finally:
        at.value = -1
    assert "failed: CUDA_ERROR_FAKE" in caplog.text
    placement = model.layers[0].current_placement
    for number in range(8, 12):
        check_sums(model, cold, engine, batch(number))
    assert model.layers[0].current_placement == placement


@pytest.mark.parametrize(
    ("pays", "took", "step", "longest"),
    [
        (True, 1e-4, 1e-3, 0.6e-3),  # seconds: of a look, of a step; from its end to a look
        (True, 4e-4, 5e-3, 2.1e-3),
        (True, 8e-3, 5e-3, 41e-3),
        (False, 1e-4, 1e-3, 21e-3),
        (True, 1e-4, None, None),
    ],
)
def test_looks_leave_time(
    weights, monkeypatch, pays: bool, took: float, step: float | None, longest: float | None
) -> None:
    """A look follows soon after each step's end, and looks take at most a fifth of the time. There
    are few without batches or gain. Waiting costs no budget."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    model, _ = make(weights)
    cache = started(model)
    cache.rate, now, looks, end = 1e9, 0.0, [], 2.0
    cache._gain.mean = 3.0 if pays else 0.0

    def sleep(seconds: float, _: float) -> None:
        nonlocal now
        now += seconds
        if step is not None:
            cache._memory.passed[-1] = int(now / step)
        if now > end:
            cache._stop.set()

    def look() -> bool:
        nonlocal now
        cache._fill_budget()
        busy = cache._passed != cache._memory.passed[-1]
        cache._passed = int(cache._memory.passed[-1])
        looks.append(now)
        now += took
        return busy

    monkeypatch.setattr(cache, "step", look)
    monkeypatch.setattr(cache, "_sleep", sleep)
    names = ("perf_counter", "thread_time", "monotonic")
    clock = SimpleNamespace(**dict.fromkeys(names, lambda: now))
    monkeypatch.setattr(caches, "time", clock)
    cache._filled = 0.0
    cache._run()
    assert len(looks) * took <= end / 5 * 1.05
    if step is None or longest is None:
        assert len(looks[:-1]) < 0.1 / caches.TICK_SECONDS + end / 5e-3
        return
    gaps = np.diff(looks)
    assert gaps.max() < longest + step and len(looks) > end / (longest + step)
    if took < step / 10:
        first = [next(t for t in looks if t >= n * step) - n * step for n in range(100, 200)]
        assert max(first) < longest
    wait = max(gaps[-1], caches.TICK_SECONDS)
    cache._budget, cache._filled, now = 0.0, now, now + wait
    cache._fill_budget()
    rate = 1e9 * (1 if pays else 1 / 64)
    assert cache._budget == pytest.approx(wait * rate, rel=0.1)


def test_a_look_that_computes_for_long(weights, monkeypatch) -> None:
    """The thread waits as long as it should, and stays."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    model, _ = make(weights)
    cache = started(model)
    naps: list[float] = []
    sleep = cache._sleep

    def nap(seconds: float, since: float) -> None:
        naps.append(seconds)
        if len(naps) > 2:
            cache._stop.set()
        sleep(seconds, since)

    monkeypatch.setattr(cache, "_until_next", lambda took: 2.0)
    monkeypatch.setattr(cache, "_sleep", nap)
    cache._run()
    assert max(naps) == 1.0 and len(naps) == 3


def test_uploads_are_published_between_looks(weights, restless, monkeypatch) -> None:
    """Soon after they are complete, while the next look has to wait."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    model, _ = make(weights)
    cache, now = started(model), 0.0
    look, publish = cache.step, cache._memory.publish
    looks: list[float] = []
    ends: list[float] = []
    published: list[float] = []

    def upload(given: Any) -> int:
        ends.extend([now + 3e-3] * len(given))
        return len(ends)

    def sleep(seconds: float, _: float) -> None:
        nonlocal now
        now += seconds
        for number in range(LAYERS):
            cache._memory.begin_pass(number, torch.tensor([[0, 5]]), None)
        if now > 0.5:
            cache._stop.set()

    def slow_look() -> bool:
        nonlocal now
        looks.append(now)
        found = look()
        now += 2e-3
        return found

    def publishing() -> None:
        published.append(now)
        publish()

    monkeypatch.setattr(cache._uploads, "start", upload)
    monkeypatch.setattr(cache._uploads, "completed", lambda: sum(end <= now for end in ends))
    monkeypatch.setattr(cache, "step", slow_look)
    monkeypatch.setattr(cache._memory, "publish", publishing)
    monkeypatch.setattr(cache, "_sleep", sleep)
    names = ("perf_counter", "thread_time", "monotonic")
    clock = SimpleNamespace(**dict.fromkeys(names, lambda: now))
    monkeypatch.setattr(caches, "time", clock)
    cache._run()
    between = sorted({*published} - {*looks})
    assert len(looks) > 20 and len(between) > 10
    for time in between:
        assert min(abs(time - end) for end in ends) < 3 * caches.TICK_SECONDS, time
    assert np.diff(looks).min() > 5 * 2e-3 * 0.99


@pytest.mark.parametrize("all_streamed", [False, True])
def test_beside_streaming(weights, restless, monkeypatch, all_streamed: bool) -> None:
    """Long batches are streamed while experts move; what the host believes to be cold may be out of
    date, and nothing is lost or doubled."""
    pytest.importorskip("triton")
    model, engine = make(weights, gpu_prefill_token_threshold=8)
    cold, _ = make(weights, num_gpu_experts=0, enable_dynamic_expert_update="off")
    rates = Rates(1e-6, ((1, 1.0),)) if all_streamed else Rates(0.5, ((1, 0.07), (2, 0.12)))
    lane = ImmediateLane()
    streamer = ExpertStreamer(lane, 1 << 20, model.layers[0].wrapper.packed_experts())
    sharing = ModelStreaming(streamer, lane, rates, 8, products)
    for layer in model.layers:
        layer.start_streaming(sharing, layer.wrapper.packed_experts())
    cache = started(model)
    now = HybridLayer._cold_experts

    def ahead(layer: HybridLayer) -> Any:
        cache.step()  # the device has its map for this batch already
        return now(layer)

    monkeypatch.setattr(HybridLayer, "_cold_experts", ahead)
    for number in range(9):
        inputs = batch(number)
        check_sums(model, cold, engine, inputs)
    assert model.stats()["streamed_experts"] and cache.counters.cache_uploads > 5


def test_locality_is_rewarded(weights) -> None:
    """Two experts that all tokens use get slots, and stay there."""
    model, engine = make(weights)
    started(model)
    for number in range(8):
        x, ids, router = batch(3 * number)
        for layer, held in zip(model.layers, engine, strict=True):
            answer(layer, held, x, torch.tensor([[6, 7]]), router)
    uploads = model.stats()["cache_uploads"]
    assert {6, 7} <= set(model.layers[0].current_placement.hot_experts) and uploads == 2 * LAYERS


@pytest.mark.parametrize(("slots", "hits"), [(1, 90), (2, 180)])
def test_few_slots_are_used(weights, slots: int, hits: int) -> None:
    """A slot does not stay empty. Two experts that all tokens use, with fewer slots than ranks of
    moves: hits of 200."""
    model, engine = make(weights[:1], num_gpu_experts=slots)
    model.start_cache(CPU)
    model.cache.begin()
    x, _, router = batch(0)
    for _ in range(100):
        answer(model.layers[0], engine[0], x, torch.tensor([[6, 7]]), router)
    stats = model.stats()
    assert stats["cache_hits"] > hits
    assert stats["cache_uploads"] >= stats["cache_evictions"] - 1


def test_padding_is_not_counted(weights) -> None:
    model, engine = make(weights)
    started(model)
    x, ids, router = batch(1)
    padding = torch.arange(7) > 3
    answer(model.layers[0], engine[0], x, ids, router, padding=padding)
    model.cache.step()
    stats = model.stats()
    assert stats["cache_hits"] + stats["cache_misses"] == 4 * K


def test_thousands_of_moves_without_growth(weights, restless, monkeypatch) -> None:
    model, _ = make(weights)
    cache = started(model)
    cache._uploads = InstantUploads()
    ids = torch.tensor([[0, 5]])

    def rounds(count: int) -> None:
        for _ in range(count):
            for number in range(LAYERS):
                cache.begin_pass(number, ids, None, None)

    rounds(200)
    gc.collect()
    before, moved = len(gc.get_objects()), cache.counters.cache_uploads
    while cache.counters.cache_uploads < moved + examples(3_000, full=10_000):
        rounds(100)
    gc.collect()
    assert len(gc.get_objects()) < before + 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: setattr(layer, "slot_weights", None), "are not known"),
        (lambda layer: _weights(layer, lambda w: w.double()), "torch.float64; accepted"),
        (
            lambda layer: _weights(layer, lambda w: w[:, ::2]),
            r"w13 of hot experts as \[3, 96, 64\]",
        ),
        (lambda layer: _weights(layer, lambda w: w.flip(1)), "a layout of its own; remove"),
    ],
)
def test_weights_that_cannot_be_replaced(weights, change, message) -> None:
    model, _ = make(weights)
    change(model.layers[1])
    with pytest.raises(OptionError, match=f"dynamic-expert-update on: layer 1.*{message}"):
        model.start_cache(CPU)


@pytest.mark.parametrize(
    ("method", "beside"), [("INT4_G32", "INT4_G128"), ("MOE_INT8", "MOE_INT4")]
)
def test_packed_slots_of_other_integers(method: str, beside: str) -> None:
    """The engine's form differs from the CPU's, which copies cannot change."""
    g = torch.Generator().manual_seed(0)
    size = {"gate": (128, 128), "up": (128, 128), "down": (128, 128)}
    packed = []
    for name in (method, beside):
        wrapper = KTMoEWrapper(0, 2, 1, 128, 128, cpuinfer_threads=1, method=name)
        every = [torch.randn(2, *size[which], generator=g) for which in MATRICES]
        wrapper.load_weights_from_tensors(*every, torch.arange(2))
        packed.append(wrapper.packed_experts())
    options = KTOptions.from_mapping({"method": method, "num_gpu_experts": 1})
    placement, shape = Placement.first(2, 1), HotShape(1, 128, 128)
    hot = packed_hot(options, 0, placement, shape, torch.bfloat16, CPU)
    cache_start._packed_slots("layer 0", hot, packed[0])
    with pytest.raises(cache_start.NoCache, match="layer 0: the engine holds .* gate as int4 with"):
        cache_start._packed_slots("layer 0", hot, packed[1])


@pytest.mark.parametrize("wrong", range(LAYERS))
def test_wrong_weights_in_a_slot_end_the_start(weights, monkeypatch, wrong: int) -> None:
    """In any layer, and with `AUTO`, too: the engine's own weights are lost by then."""
    model, engine = make(weights, enable_dynamic_expert_update=AUTO)
    fill = cache_start._fill

    def spoil(*given: Any) -> float:
        rate = fill(*given)
        engine[wrong][1][-1, 0, 0] += 1
        return rate

    monkeypatch.setattr(cache_start, "_fill", spoil)
    with pytest.raises(RuntimeError, match=f"layer {wrong}, expert {SLOTS - 1}: .* down has other"):
        model.start_cache(CPU)


@pytest.mark.parametrize("place", ["_memory", "_uploads", "_values"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("no 2 GiB\nfree"), r"memory of cpu is used up \(no 2 GiB\)$"),
        (RuntimeError("cannot be pinned"), "cannot be pinned$"),
    ],
)
def test_missing_memory(weights, monkeypatch, place: str, error: Exception, message: str) -> None:
    """Nothing was replaced, so that `AUTO` serves with the placement."""

    def fail(*given: Any) -> Any:
        raise error

    monkeypatch.setattr(cache_start, place, fail)
    model, engine = make(weights, enable_dynamic_expert_update=AUTO)
    before = engine[0][0].clone()
    with pytest.raises(cache_start.NoCache, match=message):
        cache_start.start_cache(model.layers, CPU, None)
    assert "do not move while serving: " in model.start_cache(CPU)
    assert torch.equal(engine[0][0], before)
    with pytest.raises(OptionError, match="dynamic-expert-update on: .*; remove the flag"):
        make(weights)[0].start_cache(CPU)


@pytest.mark.parametrize("slots", [1, SLOTS])
def test_the_measured_rate(weights, monkeypatch, slots: int) -> None:
    """The first upload to each slot prepares the next ones, so neither its time nor its bytes
    count."""
    now, seen = 0.0, []

    class Slow(InstantUploads):
        def start(self, uploads: Any) -> int:
            nonlocal now
            now += len(uploads) if seen else 100.0
            seen.extend(upload.expert for upload in uploads)
            return super().start(uploads)

    model, _ = make(weights[:1], num_gpu_experts=slots)
    layer = model.layers[0]
    held = caches.CachedLayer(
        layer.wrapper.packed_experts(),
        DenseSlots(*layer.slot_weights),
        LayerSlots(layer.placement, np.zeros(E, np.int32)),
    )
    monkeypatch.setattr(cache_start.time, "perf_counter", lambda: now)
    assert cache_start._fill([held], Slow()) == held.packed.expert_bytes
    assert seen == [*range(slots)] * 2


@pytest.mark.parametrize(("rate", "shown"), [(20 << 30, "20GB"), (300 << 20, "300MB")])
def test_the_log_shows_a_rate_as_it_is_given(weights, rate: int, shown: str) -> None:
    model, _ = make(weights)
    cache = started(model)
    cache.rate = float(rate)
    line = cache_start.describe(cache, rate)
    assert f" at up to {shown} per second (given); " in line
    assert f"uploads of {shown_size(cache.layers[0].packed.expert_bytes)} at" in line


def test_advice_where_it_can_help() -> None:
    on_gpu = cache_start._own_layout("w2", torch.device("cuda"))
    assert (
        on_gpu.startswith(cache_start._own_layout("w2", CPU)) and "--moe-backend triton" in on_gpu
    )


def _weights(layer: HybridLayer, changed: Any) -> None:
    assert layer.slot_weights is not None
    w13, w2 = layer.slot_weights
    layer.slot_weights = changed(w13), changed(w2)


def test_auto_keeps_the_placement_if_experts_cannot_move(weights, monkeypatch) -> None:
    monkeypatch.setenv("KT_KERNEL_KIND", "vector")
    model, engine = make(weights, enable_dynamic_expert_update=AUTO)
    line = model.start_cache(CPU)
    assert line is not None and "do not move while serving: with KT_KERNEL_KIND" in line
    fixed, _ = make(weights, enable_dynamic_expert_update="off")
    inputs = batch(1)
    found = answer(model.layers[0], engine[0], *inputs)
    assert torch.equal(found, answer(fixed.layers[0], engine[0], *inputs))
    with pytest.raises(OptionError, match="dynamic-expert-update on: with KT_KERNEL_KIND"):
        make(weights)[0].start_cache(CPU)


def test_placements_of_a_live_cache_cannot_be_set(weights) -> None:
    model, _ = make(weights)
    started(model)
    with pytest.raises(RuntimeError, match="set_placement while the live cache"):
        model.layers[0].set_placement(Placement.first(E, SLOTS))
    json.dumps(model.layers[0].current_placement.hot_experts)
