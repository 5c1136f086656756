"""Streamed layers in a trace, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from trace_cases import record, where

from kt_kernel.trace.reader import read
from kt_kernel.trace.records import StreamedGroup, StreamedRecord
from kt_kernel.trace.streamed import StreamedTimes, summarise_streamed
from kt_kernel.trace.summary import summarise
from kt_kernel.trace.writer import TraceWriter


def layer(position: int, number: int, start: int, tokens: int, on_cpu: int) -> StreamedRecord:
    """6 + 2 experts of 1 MB, in 160 us on the bus, for the first 100 of which the GPU waits."""
    first, second, third, fourth = (start + at for at in (100_000, 120_000, 160_000, 180_000))
    groups = (
        StreamedGroup(6, 6_000_000, start, first, start, first, second),
        StreamedGroup(2, 2_000_000, first, third, second, third, fourth),
    )
    return StreamedRecord(
        f"layer {position}", position, 4, number, tokens, 8, on_cpu, start, start + 200_000, groups
    )


@pytest.fixture
def trace(tmp_path) -> list[dict[str, Any]]:
    """Two batches of two layers. The CPU computes a part of the first, for 250 us, and the GPU
    waits for it for 60. The same layer decodes before and after."""
    path = tmp_path / "t"
    writer = TraceWriter(path, "cuda:0")
    streamed, cpu = [], []
    for number in range(4):
        position, start = number % 2, 10**9 * (number + 1)
        streamed.append(layer(position, number + 1, start, 4096, 3 * (position == 0)))
        if position == 0:
            for at, tokens, work in ((-(10**6), 1, 9000), (5000, 4096, 250_000), (10**6, 1, 9000)):
                t = start + at
                cpu.append(
                    record(
                        slot=0,
                        number=len(cpu),
                        chain=4,
                        tokens=tokens,
                        hand_start=t,
                        hand_end=t,
                        seen=t,
                        begun=t,
                        ended=t + work,
                        rung=t + work,
                        back_start=t + work - 60_000,
                        back_ready=t + work,
                        back_end=t + work,
                    )
                )
    writer.write(cpu, where)
    writer.write_streamed(streamed)
    writer.write_streamed([layer(0, 5, 10**10, 2048, 0)])
    return read(path)


def test_three_lanes(trace) -> None:
    [model] = summarise_streamed(trace)
    assert (model.device, model.chain, model.tokens, model.batches) == ("cuda:0", 4, 4096, 2)
    assert model.counts == {2048: 1, 4096: 2}
    shared = dict(bus=160, gpu=40, bus_wait=140, streamed=8, megabytes=8, batches=2)
    assert model.layers == [
        StreamedTimes("layer 0", 0, **shared, on_cpu=3, cpu=250, cpu_wait=60, elapsed=260),
        StreamedTimes("layer 1", 1, **shared, on_cpu=0, cpu=0, cpu_wait=0, elapsed=200),
    ]
    assert model.bus_share == pytest.approx(320 / 460)
    assert model.gpu_share == pytest.approx(80 / 460)
    assert model.cpu_share == pytest.approx(250 / 460)
    assert model.gigabytes_s == pytest.approx(50)


def test_beside_batches_that_are_not_streamed(trace) -> None:
    summary = summarise(trace)
    assert [model.tokens for model in summary.models] == [1]  # decode
    assert [model.tokens for model in summary.streamed] == [4096]
    few = summarise(trace, 2048)
    assert not few.models and few.streamed[0].layers[0].elapsed == 200
    with pytest.raises(ValueError, match="no pass of 3 tokens in this trace; accepted: 1, 2048, 4"):
        summarise(trace, 3)


def test_a_layer_that_is_not_whole_does_not_count(trace) -> None:
    """Such as the last one of a file that was cut."""
    cut = [e for e in trace if e["args"].get("entry") != 4 or e["name"] != "streamed layer"]
    assert [row.batches for row in summarise_streamed(cut)[0].layers] == [2, 1]
    assert not summarise_streamed([event for event in trace if event["name"] != "streamed layer"])
