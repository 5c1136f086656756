"""Hybrid layers whose long batches are streamed: the same results as on the CPU alone. Triton's
interpreter unpacks, and torch stands in for an engine's kernels."""

from __future__ import annotations

import gc
import re
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
import torch
from simulated_gpu import Pins, divide_routes, interleaves, products
from streamed_layers import (
    BOTH,
    BUS_ONLY,
    CPU,
    CPU_ONLY,
    PER_TOKEN,
    THRESHOLD,
    E,
    FakeDevice,
    K,
    answers,
    batch,
    make,
    stream,
)

from kt_kernel.device.streaming import rates
from kt_kernel.device.streaming.experts import PackedExperts
from kt_kernel.device.streaming.rates import Rates, Timed
from kt_kernel.device.tracer import tracer_of
from kt_kernel.serving import streaming, streaming_start
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.serving.option_table import OptionError
from kt_kernel.testing import row_error
from kt_kernel.trace import pieces
from kt_kernel.trace.reader import read
from kt_kernel.trace.summary import summarise

pytest.importorskip("triton")


@pytest.mark.parametrize("rates", [BOTH, BUS_ONLY, CPU_ONLY], ids=["both", "bus", "cpu"])
@pytest.mark.parametrize("hot", [(), (4, 1)])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.uint8])
def test_the_same_as_on_the_cpu(monkeypatch, rates, hot, ids_dtype) -> None:
    layer, alone = make(monkeypatch, hot), make(monkeypatch, hot)
    lane = stream(layer, rates)
    for tokens in (1, THRESHOLD - 1, THRESHOLD, 40):
        inputs = batch(tokens, ids_dtype)
        calls, copied = layer.stats()["expert_calls"], lane.copied
        padding = torch.zeros(tokens, dtype=torch.bool)
        padding[0] = tokens > 1
        slot = {"padding": padding} if tokens == 40 else {}
        found, want = answers(layer, inputs, **slot), answers(alone, inputs, **slot)
        for mine, theirs in zip(found[0], want[0], strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
        calls = layer.stats()["expert_calls"] - calls
        copied = lane.copied - copied
        if tokens < THRESHOLD:
            assert torch.equal(found[1], want[1]) and calls and not copied
            continue
        assert row_error(found[1], want[1].double()).max() < 0.01
        if rates is BOTH:
            assert calls and copied  # expert 0 is streamed, others are not
        else:
            assert bool(calls) == (rates is CPU_ONLY) and bool(copied) == (rates is BUS_ONLY)


@pytest.mark.parametrize("rates", [BUS_ONLY, BOTH], ids=["bus", "both"])
@pytest.mark.parametrize(
    "padding", [torch.zeros(39, dtype=torch.bool), torch.zeros(40, dtype=torch.int32)]
)
def test_a_mask_of_another_kind(monkeypatch, rates, padding) -> None:
    """Nothing is copied for it, and the next batch is right."""
    layer, alone = make(monkeypatch), make(monkeypatch)
    lane = stream(layer, rates)
    with pytest.raises(ValueError, match=r"layer 3: padding is \[(39|40)\] torch\.\w+ of"):
        layer.submit(*batch(40), cold_slot=-1, padding=padding)
    assert not lane.copied
    found, want = answers(layer, batch(40))[1], answers(alone, batch(40))[1]
    assert row_error(found, want.double()).max() < 0.01


def test_a_streamed_layer_defers_nothing(monkeypatch) -> None:
    """Without streaming, this layer would leave its lowest experts to the next one."""
    layer = make(monkeypatch, max_deferred_experts_per_token=2)
    want = answers(make(monkeypatch), batch(40))[1]
    stream(layer, CPU_ONLY)
    assert torch.equal(answers(layer, batch(40))[1], want)


def test_only_cold_experts_are_streamed(monkeypatch) -> None:
    """The counters agree."""
    layer = make(monkeypatch)
    lane = stream(layer, BUS_ONLY)
    expert_bytes = layer.wrapper.packed_experts().expert_bytes
    answers(layer, batch(20))
    assert lane.copied == E * expert_bytes
    layer = make(monkeypatch, (4, 1))
    lane = stream(layer, BUS_ONLY)
    answers(layer, batch(20))
    assert lane.copied == 4 * expert_bytes
    counters = layer.stats()
    assert counters["streamed_batches"] == 1 and counters["streamed_experts"] == 4
    assert counters["streamed_bytes"] == lane.copied


def test_nothing_is_streamed_in_a_graph(monkeypatch, caplog) -> None:
    layer = make(monkeypatch)
    lane = stream(layer, BUS_ONLY)
    lane.in_capture = True
    for tokens in (41, 40):
        want = answers(make(monkeypatch), batch(tokens))[1]
        assert torch.equal(answers(layer, batch(tokens))[1], want) and not lane.copied
    [warning] = caplog.messages
    assert warning.startswith("kt: batches of 41 tokens are captured in a CUDA graph")


def start(
    layer: HybridLayer,
    make_device: Any = FakeDevice,
    device: torch.device = CPU,
    left: int = 1 << 40,
    captured: int = 0,
    largest: int | None = None,
) -> Any:
    engine = streaming_start.EngineSide(
        products, interleaves, lambda _: left, captured, largest, "--graphs"
    )
    options = layer.options
    if options.gpu_prefill_token_threshold is None:  # the device is not a GPU
        options = replace(options, gpu_prefill_token_threshold="auto")
    return streaming_start.start_streaming(
        [layer], options, device, torch.bfloat16, engine, make_device
    )


class NoMemory(FakeDevice):
    """The second part of the weights cannot be registered."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.backend.limit = 0


def test_start(monkeypatch) -> None:
    """Rates are measured, and the line for the log has them; the batches for that are not counted.
    Engines load under the context of a device, which is not the CPU."""
    monkeypatch.setattr(rates, "_REPETITIONS", 1)
    layer = make(monkeypatch, gpu_prefill_token_threshold=THRESHOLD)
    with torch.device("meta"):
        line = start(layer)
    assert line is not None and line.startswith(
        "kt: batches of 8 tokens and more (given; by the measured rates, streaming pays from "
    )
    assert "6 experts at a time" in line
    assert not any(layer.stats().values())
    want = answers(make(monkeypatch), batch(40))[1]
    assert row_error(answers(layer, batch(40))[1], want.double()).max() < 0.01
    assert layer.stats()["streamed_batches"] == 1


def fixed_rates(monkeypatch: pytest.MonkeyPatch, rates: Rates) -> None:
    """In place of those that would be measured."""
    monkeypatch.setattr(streaming_start, "measure_bus", lambda *_: rates.expert_on_bus)
    on_cpu = rates.expert_on_cpu, rates.token_on_cpu
    monkeypatch.setattr(streaming_start, "measure_cpu", lambda *_: on_cpu)
    once = Timed(rates.host, rates.streaming + E * rates.expert_on_bus)
    monkeypatch.setattr(streaming_start, "measure_streaming", lambda *_: once)
    monkeypatch.setattr(streaming_start, "HOST_LAUNCHES", 0.0)
    monkeypatch.setattr(streaming_start, "COPIES_AHEAD", rates.ahead)
    monkeypatch.setattr(streaming_start._Start, "_measured_from", lambda self, pays, *_: pays)


def test_the_threshold_follows_from_the_rates(monkeypatch) -> None:
    """Six experts take 0.6 s on the bus. The few that have routes take 0.06 s + 0.1 s per token on
    the CPU, which computes some meanwhile: streaming is a tenth faster from a few tokens on."""
    rates = Rates(0.1, PER_TOKEN, 0.0, 0.1)
    fixed_rates(monkeypatch, rates)
    layer = make(monkeypatch)
    line = start(layer)
    pays = rates.pays_from(E, K)
    assert pays is not None and 2 < pays < 20
    assert line.startswith(f"kt: batches of {pays} tokens and more (measured; --kt-gpu-prefill-")
    for tokens, streamed in ((pays - 1, 0), (pays, 1)):
        answers(layer, batch(tokens))
        assert layer.stats()["streamed_batches"] == streamed


def test_routes_to_some_of_the_cold_experts() -> None:
    """Experts 1 and 4 are hot, and keep their routes; two others have those of all four."""
    routes = streaming_start.spread_routes(12, 2, E)
    found = streaming_start.routes_to(2, [0, 2, 3, 5], routes)
    assert found.flatten().bincount(minlength=E).tolist() == [8, 4, 0, 8, 4, 0]
    assert torch.equal(found == 1, routes == 1) and torch.equal(found == 4, routes == 4)


def test_the_threshold_is_measured(monkeypatch) -> None:
    """By their rates, 3 tokens would do. But a streamed layer takes a second whatever there is, and
    the CPU a tenth of a second for each token: 3, 4, 5, 7 and 9 are too few. More tokens are needed
    if the host takes longer, with what else it launches."""
    measured = streaming_start._Start._measured_from
    rates = Rates(0.001, PER_TOKEN)
    fixed_rates(monkeypatch, rates)
    monkeypatch.setattr(streaming_start._Start, "_measured_from", measured)
    monkeypatch.setattr(Rates, "pays_from", lambda *_: 3)
    monkeypatch.setattr(streaming_start, "measure_streaming", lambda *_: Timed(0.9, 1.0))
    monkeypatch.setattr(streaming_start, "timed_on_cpu", lambda _, ids, *__: 0.1 * len(ids))
    assert start(make(monkeypatch)).startswith("kt: batches of 12 tokens and more (measured;")
    assert "it pays for no batch" in start(make(monkeypatch), largest=11)
    monkeypatch.setattr(streaming_start, "HOST_LAUNCHES", 0.1)
    assert "batches of 12 tokens" in start(make(monkeypatch))
    monkeypatch.setattr(streaming_start, "HOST_LAUNCHES", 0.6)
    assert "batches of 19 tokens" in start(make(monkeypatch))
    monkeypatch.setattr(streaming_start, "timed_on_cpu", lambda *_: 1.0)
    assert "it pays for no batch" in start(make(monkeypatch))


def test_short_batches_are_prepared(monkeypatch) -> None:
    """An engine may run long batches only before it captures short ones: each kind of batch runs on
    the way of short ones once, without routes."""
    layer = make(monkeypatch)
    stream(layer, BUS_ONLY)
    for number, cold_slot in ((1, -1), (1, -1), (2, 0)):
        layer.submit(*batch(40), cold_slot=cold_slot)
        layer.collect(batch(40)[0], None)
        assert layer.stats()["forwards"] == number and layer.stats()["expert_calls"] == 0
    layer.submit(*batch(40), cold_slot=0, padding=torch.zeros(40, dtype=torch.bool))
    layer.collect(batch(40)[0], None)
    assert layer.stats()["forwards"] == 3


@pytest.mark.parametrize("given", [None, THRESHOLD])
def test_captured_batches_are_never_streamed(monkeypatch, given: int | None) -> None:
    """Not even before the capture: such a batch prepares it."""
    fixed_rates(monkeypatch, BUS_ONLY)
    layer = make(monkeypatch, gpu_prefill_token_threshold=given)
    line = start(layer, captured=20)
    assert line.startswith("kt: batches of 21 tokens and more (")
    assert f"{given or 1} would do, but the engine captures batches of up to 20 tokens" in line
    for tokens, streamed in ((20, 0), (21, 1)):
        answers(layer, batch(tokens))
        assert layer.stats()["streamed_batches"] == streamed


def test_no_batch_is_large_enough(monkeypatch) -> None:
    """Then no memory is taken. A number above the largest batch is an error."""

    def no_device(device: torch.device) -> None:
        raise AssertionError

    layer = make(monkeypatch)
    assert "captures all its batches, of up to 20" in start(
        layer, no_device, captured=20, largest=20
    )
    given = make(monkeypatch, gpu_prefill_token_threshold=THRESHOLD)
    with pytest.raises(OptionError, match=r"threshold 8: .* all its .*; --graphs changes"):
        start(given, no_device, captured=30, largest=20)
    with pytest.raises(OptionError, match=r"threshold 8: .* up to 7 tokens; give 5 to 7, 0 for"):
        start(given, no_device, captured=4, largest=7)
    fixed_rates(monkeypatch, BUS_ONLY)
    assert start(given, largest=THRESHOLD).startswith("kt: batches of 8 tokens and more (given")


def test_an_eighth_of_the_memory_that_is_left(monkeypatch) -> None:
    """An expert is on the device packed twice and unpacked once."""
    fixed_rates(monkeypatch, BUS_ONLY)
    experts = make(monkeypatch).wrapper.packed_experts()
    one = 2 * experts.expert_bytes + 2 * experts.expert_values
    for rooms in (1, 3):
        layer = make(monkeypatch)
        assert f"{rooms} experts at a time" in start(layer, left=8 * rooms * one)
        want = answers(make(monkeypatch), batch(40))[1]
        assert row_error(answers(layer, batch(40))[1], want.double()).max() < 0.01
    for left in (8 * one - 8, 0, -5):
        layer = make(monkeypatch)
        line = start(layer, left=left)
        assert re.match(r"kt: no experts are streamed to the GPU: 0(\.\d+)?MB on cpu are too", line)
        assert "takes an eighth of the " in line and "\n" not in line
        answers(layer, batch(40))
        assert "streamed_batches" not in layer.stats()


def test_half_of_the_memory_that_is_left_with_a_threshold(monkeypatch) -> None:
    """2 GB at most, as by default."""
    fixed_rates(monkeypatch, BUS_ONLY)
    taken: list[int] = []

    class Noted(streaming_start.ExpertStreamer):
        def __init__(self, lane: Any, memory: int, *given: Any) -> None:
            taken.append(memory)
            super().__init__(lane, memory, *given)

    monkeypatch.setattr(streaming_start, "ExpertStreamer", Noted)
    for left in (1 << 20, 5 << 30):
        start(make(monkeypatch, gpu_prefill_token_threshold=THRESHOLD), left=left)
    start(make(monkeypatch, gpu_prefill_memory=3 << 20), left=1 << 20)
    assert taken == [1 << 19, 2 << 30, 3 << 20]
    layer = make(monkeypatch, gpu_prefill_token_threshold=THRESHOLD)
    message = (
        r"threshold 8: 0\.03MB .* too little .* needs \d\.\d+MB; .* takes half of the 0\.07MB that "
        ".*; give more by --kt-gpu-prefill-m"
    )
    with pytest.raises(OptionError, match=message):
        start(layer, left=80_000)


def test_why_nothing_is_streamed_by_default(monkeypatch) -> None:
    """One line in the log, and the CPU computes all batches."""

    def why(make_device: Any = FakeDevice, **options: Any) -> str:
        layer = make(monkeypatch, **options)
        line = start(layer, make_device)
        want = answers(make(monkeypatch), batch(40))[1]
        assert torch.equal(answers(layer, batch(40))[1], want) and "\n" not in line
        assert "streamed_batches" not in layer.stats()
        return line.removeprefix("kt: no experts are streamed to the GPU: ")

    assert why(streaming_start.Device).startswith("experts can only be streamed to a CUDA device")
    assert why(NoMemory) == "cannot be pinned"
    fixed_rates(monkeypatch, CPU_ONLY)
    devices: list[FakeDevice] = []

    def kept(device: torch.device) -> FakeDevice:
        devices.append(FakeDevice(device))
        return devices[-1]

    assert why(gpu_prefill_memory=1 << 30).startswith("it pays for no batch")
    assert why(kept).startswith("it pays for no batch; an expert takes 1000000000000 us on")
    assert not devices[0].backend.pinned  # given back
    monkeypatch.setattr(streaming_start, "ExpertStreamer", full)
    assert why() == "2GB are not free on cpu"
    monkeypatch.setenv("KT_KERNEL_KIND", "vector")
    assert why().startswith("with KT_KERNEL_KIND, results must not depend on the batch")


def full(*_: Any) -> None:
    raise torch.OutOfMemoryError("no room")


@pytest.mark.parametrize("options", [{}, {"gpu_prefill_token_threshold": "auto"}])
def test_the_threshold_is_measured_by_default(monkeypatch, options: dict) -> None:
    """On a GPU. Elsewhere nothing is said of it unless an option asks for it."""
    fixed_rates(monkeypatch, BUS_ONLY)
    layer = make(monkeypatch, **options)
    engine = streaming_start.EngineSide(products, interleaves, lambda _: 1 << 40)

    def line(device: torch.device, make_device: Any) -> Any:
        given = [layer], layer.options, device, torch.bfloat16, engine, make_device
        return streaming_start.start_streaming(*given)

    found = line(CPU, streaming_start.Device)
    assert (found is None) == (not options)
    # The simulated device is on the CPU, whatever its name.
    assert line(torch.device("cuda", 0), FakeDevice).startswith(
        "kt: batches of 1 tokens and more (measured;"
    )


def test_no_threshold(monkeypatch) -> None:
    layer = make(monkeypatch, gpu_prefill_token_threshold=0)
    assert start(layer) is None and "streamed_batches" not in layer.stats()


def test_refusals(monkeypatch) -> None:
    layer = make(monkeypatch, gpu_prefill_token_threshold=8, gpu_prefill_memory=20_000)
    with pytest.raises(
        OptionError, match=r"^--kt-gpu-prefill-memory 0.02MB: .* too little .* needs"
    ):
        start(layer)
    layer = make(monkeypatch, gpu_prefill_memory=20_000)
    with pytest.raises(OptionError, match=r"^--kt-gpu-prefill-memory 0.02MB: .*; give more$"):
        start(layer)
    with (
        monkeypatch.context() as patched,
        pytest.raises(OptionError, match=r"0\.02MB are not free on"),
    ):
        patched.setattr(streaming_start, "ExpertStreamer", full)
        start(layer)
    layer = make(monkeypatch, gpu_prefill_token_threshold=8)
    with pytest.raises(OptionError, match="CUDA device, and the engine runs on cpu; remove it"):
        start(layer, streaming_start.Device)

    with pytest.raises(OptionError, match="threshold 8: cannot be pinned; raise the limit"):
        start(layer, NoMemory)
    monkeypatch.setattr(
        layer.wrapper,
        "packed_experts",
        lambda: (_ for _ in ()).throw(
            ValueError("layer 3: these experts cannot be copied to a GPU: they have biases")
        ),
    )
    with pytest.raises(OptionError, match="threshold 8: layer 3: .*biases; remove it"):
        start(layer)


def test_trace_and_counters(monkeypatch, tmp_path) -> None:
    """A layer that is shared, then one that is streamed whole: both in the file, in the CPU's
    clock, and counted. The times of a layer are known when the next one starts."""
    monkeypatch.setenv("KT_TRACE", str(tmp_path / "trace.json"))
    layer = make(monkeypatch)
    lane, begin = stream(layer, BOTH), time.monotonic_ns() / 1e3
    for tokens in (20, 20, THRESHOLD):
        answers(layer, batch(tokens))
    end = time.monotonic_ns() / 1e3
    monkeypatch.setattr(streaming.ModelStreaming, "whole", lambda *_: True)
    answers(layer, batch(30))
    answers(layer, batch(9))
    tracer_of(CPU).close()
    events = read(tmp_path / "trace.json")
    copies = [event for event in events if event["name"] == pieces.COPIES]
    shown = [event for event in events if event["name"] == pieces.LAYER]
    assert [event["args"]["tokens"] for event in shown] == [20, 20, THRESHOLD, 30]
    assert all(begin <= e["ts"] and e["ts"] + e["dur"] <= end for e in shown[:3])
    last = E * layer.wrapper.packed_experts().expert_bytes
    assert sum(event["args"]["bytes"] for event in copies) == lane.copied - last
    counters = layer.stats()
    experts = [event["args"]["experts"] for event in shown]
    left = [event["args"]["on_cpu"] for event in shown]
    assert 0 < experts[0] < E and left[0] and experts[3] == E and not left[3]
    assert counters["streamed_experts"] == sum(experts) + E
    assert counters["shared_experts"] == sum(left) and counters["shared_batches"] == 3
    assert counters["shared_routes"] == counters["expert_calls"]
    assert counters["streamed_tokens"] == 20 + 20 + THRESHOLD + 30 + 9
    assert counters["streamed_bytes"] == lane.copied and counters["split_wait_ns"] > 0
    [model] = summarise(events, 20).streamed
    [row] = model.layers
    assert (row.layer, row.batches, row.streamed, row.on_cpu) == (
        "layer 3",
        2,
        experts[0],
        left[0],
    )


def test_two_models(monkeypatch) -> None:
    """Their batches are under way at once. One that is gone gives its registration back, and the
    other one goes on."""
    kept, gone = make(monkeypatch), make(monkeypatch, (4, 1))
    pins = Pins()
    for layer in (kept, gone):
        stream(layer, BUS_ONLY)
        layer._streaming._packed.register(pins)
    first, second = batch(12), batch(9)
    want = [answers(make(monkeypatch, hot), b)[1] for hot, b in (((), first), ((4, 1), second))]
    kept.submit(*first, cold_slot=-1)
    gone.submit(*second, cold_slot=-1)
    for layer, inputs, theirs in ((gone, second, want[1]), (kept, first, want[0])):
        mine = layer.collect(inputs[0], torch.ones_like(inputs[0]), scale=2.0)
        assert row_error(mine, theirs.double()).max() < 0.01
    registered = len(pins.pinned)
    del gone, layer
    gc.collect()
    assert 0 < len(pins.pinned) < registered
    assert row_error(answers(kept, first)[1], want[0].double()).max() < 0.01


@pytest.mark.parametrize("where", ["between submit and collect", "in the products"])
def test_a_batch_that_was_cancelled(monkeypatch, where: str) -> None:
    """The engine gives up a batch of which the CPU computes a part; later ones are right."""
    layer = make(monkeypatch)
    stream(layer, BOTH)
    lost = batch(30)
    layer.submit(*lost, cold_slot=-1)
    if where == "in the products":

        def fail(*_: Any) -> torch.Tensor:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="out of memory"):
            patched.setattr(layer._streamed.batch._model, "products", fail)
            layer.collect(lost[0], None)
    for tokens in (30, 20):
        want = answers(make(monkeypatch), batch(tokens))[1]
        assert row_error(answers(layer, batch(tokens))[1], want.double()).max() < 0.01


def test_nothing_grows(monkeypatch) -> None:
    """Over a thousand prompts of different lengths, shared and whole."""
    monkeypatch.setattr(PackedExperts, "unpack", lambda *_: None)
    layer = make(monkeypatch)
    stream(layer, BOTH)
    monkeypatch.setattr(layer._streaming._model, "products", lambda x, *_: torch.zeros_like(x))
    monkeypatch.setattr(streaming, "_KEPT", 64)
    monkeypatch.setattr(streaming, "divide_routes", divide_routes)  # faster

    def prompts(count: int) -> None:
        for i in range(count):
            answers(layer, batch(THRESHOLD + i % 200))

    prompts(400)  # of as many lengths each time, as some are remembered
    gc.collect()
    tracemalloc.start()
    try:
        prompts(200)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        prompts(1000)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < before + 20_000
    finally:
        tracemalloc.stop()
    assert layer.stats()["streamed_batches"] == 1600
    assert 0 < layer.stats()["shared_batches"] <= 1600
