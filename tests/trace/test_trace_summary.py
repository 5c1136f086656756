"""Times per layer and model, against numbers worked out by hand."""

import pytest
from trace_cases import batch, where

from kt_kernel.trace.pieces import WAIT
from kt_kernel.trace.reader import read
from kt_kernel.trace.summary import LayerTimes, summarise
from kt_kernel.trace.writer import TraceWriter

IDLE = 10**9  # between two passes


@pytest.fixture
def trace(tmp_path):
    """Two decode passes of two layers, the first layer deferring once, then one of prefill; and
    a pass of another model."""
    path, records, now = tmp_path / "t", [], 10**9
    writer = TraceWriter(path, "cuda:0")
    for tokens, gap, first, second in (
        (1, 10_000, dict(cpu=50_000, late=20_000), dict(cpu=10_000)),
        (1, 12_000, dict(cpu=70_000), dict(cpu=0)),
        (512, 10_000, dict(cpu=900_000), dict(cpu=900_000)),
    ):
        for position, lasts in enumerate((first, second)):
            made, end = batch(
                now,
                number=len(records),
                position=position,
                slot=position,
                chain=4,
                tokens=tokens,
                **lasts,
            )
            records.append(made)
            now = end + (gap if position == 0 else IDLE)
    records.append(batch(now, number=len(records), slot=9, chain=5, tokens=2, cpu=0, hot=0)[0])
    writer.write(records, where)
    return read(path)


def test_decode(trace):
    model, draft = summarise(trace).models
    assert (model.device, model.chain, model.tokens, model.passes) == ("cuda:0", 4, 1, 2)
    assert model.counts == {1: 2, 512: 1}
    # exposed: the answer comes 1 + cpu + 2 us after the hand-over, of which 30 are the GPU's own
    assert model.layers == [
        LayerTimes(
            "layer 0", 0, 2, cpu=(50 + 20 + 70) / 2, gpu=30, transfers=7, exposed=(23 + 43) / 2
        ),
        LayerTimes("layer 1", 1, 2, cpu=10 / 2, gpu=30 + (10 + 12) / 2, transfers=7, exposed=0),
    ]
    assert (model.t_cpu, model.t_gpu, model.exposed, model.elapsed) == (75, 85, 33, 118)
    assert model.bound == pytest.approx(160 / 85)
    assert model.reached == pytest.approx(160 / 118)
    assert model.share == pytest.approx(85 / 118)
    assert (draft.chain, draft.tokens, draft.t_cpu, draft.t_gpu, draft.exposed) == (5, 2, 0, 7, 3)
    assert draft.bound == 1 and draft.reached == draft.share == 0.7


def test_tokens(trace):
    (model,) = summarise(trace, 512).models
    assert (model.chain, model.tokens, model.passes) == (4, 512, 1)
    assert [row.exposed for row in model.layers] == [873, 873]
    assert summarise(trace, 2).models == summarise(trace).models[1:]
    with pytest.raises(ValueError, match="no pass of 3 tokens in this trace; accepted: 1, 2, 512"):
        summarise(trace, 3)


def test_batches_that_are_not_whole_do_not_count(trace):
    """Such as the last one of a file that was cut."""
    whole = summarise(trace).models[0].layers
    lost = max(n for n, e in enumerate(trace) if e["name"] == WAIT and e["args"]["tokens"] == 1)
    rows = summarise(trace[:lost] + trace[lost + 1 :]).models[0].layers
    assert rows[0] == whole[0]
    assert (rows[1].passes, rows[1].cpu, rows[1].gpu) == (1, 10, 40)


def test_others_events_do_not_count(trace):
    piece = next(event for event in trace if event["name"] == WAIT)
    others = [
        {},
        {"name": ["x"], "pid": 1, "args": {}},
        dict(piece, name="kernel"),
        dict(piece, pid="1"),
        dict(piece, dur=None),
        dict(piece, args=[]),
        dict(piece, args=dict(piece["args"], layer=1)),
        {"name": "process_name", "pid": []},
    ]
    assert summarise(trace + others) == summarise(trace)
    for events in ([], others):
        with pytest.raises(ValueError, match="no batch in this trace; expected .*KT_TRACE"):
            summarise(events)


def test_nothing_to_divide_by(tmp_path):
    path = tmp_path / "t"
    made, _ = batch(10_000, tokens=1, hand=0, seen=0, cpu=0, hot=0, answer=0, back=0)
    TraceWriter(path, "cuda:0").write([made], where)
    (model,) = summarise(read(path)).models
    assert model.elapsed == 0 and model.bound is model.reached is model.share is None
