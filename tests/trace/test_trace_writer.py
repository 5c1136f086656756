"""A trace's file: what of the records is in it, in which clock, and that it can always be read."""

import json
import logging
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_cases import batch, record, where

from kt_kernel.trace.pieces import BUS, CPU, LANE_OF, LANES
from kt_kernel.trace.reader import read
from kt_kernel.trace.records import Record
from kt_kernel.trace.writer import TraceWriter


def pieces(path):
    """Its events without the names of threads."""
    return [event for event in read(path) if event["ph"] == "X"]


def nanoseconds(microseconds):
    return round(microseconds * 1000)


def of(record, before=None):
    """What is to be seen of a record: names with start and end, in the clock of the record."""
    r = record
    return {
        "experts": (r.begun, r.ended),
        "deferred experts": (r.late_begun, r.late_ended),
        "hand over": (r.hand_start, r.hand_end),
        "take back": (r.back_ready, r.back_end),
        "hot experts": (r.hand_end, r.back_start),
        "wait for the CPU": (r.back_start, r.back_ready),
        **({"between layers": (before.back_end, r.hand_start)} if before else {}),
    }


def lengths(events):
    return {event["name"]: nanoseconds(event["dur"]) for event in events}


def test_a_layer(tmp_path):
    path = tmp_path / "trace.json"
    made, _ = batch(10_000, slot=3, number=7, position=2, chain=1, tokens=5, late=9000)
    writer = TraceWriter(path, "cuda:0")
    writer.write([made], where)
    writer.close()
    events = json.loads(path.read_text())
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    assert list(names.values()) == ["GPU", "transfers", "CPU pool", "bus"] == [*LANES, BUS]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["cuda:0"]
    shown = [event for event in events if event["ph"] == "X"]
    assert lengths(shown) == {name: end - start for name, (start, end) in of(made).items()}
    about = {"layer": "layer 3", "position": 2, "chain": 1, "entry": 7, "tokens": 5}
    for event in shown:
        assert event["args"] == about and names[event["tid"]] == LANE_OF[event["name"]]
    assert len({event["pid"] for event in events}) == 1


@st.composite
def runs(draw):
    """Calls of `write`, and the true time by the GPU's clock."""
    shift = draw(st.integers(-(10**11), 2 * 10**18))
    drift = draw(st.integers(-100, 100))  # in millionths
    true = {}

    def clock(t):
        shown = t + shift + t * drift // 10**6
        true[shown] = t
        return shown

    length = st.integers(0, 100_000)
    delay = st.integers(0, 5000)
    now, number, calls = 10**12, draw(st.sampled_from([1, 2**32 - 3])), []
    for count in draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)):
        call = []
        for _ in range(count):
            made, end = batch(
                now,
                clock,
                number=number % 2**32,
                position=number % 3,
                slot=number % 3,
                tokens=1,
                hand=draw(length),
                seen=draw(delay),
                cpu=draw(length),
                late=draw(length),
                hot=draw(length),
                answer=draw(delay),
                back=draw(length),
            )
            call.append(made)
            number, now = number + 1, end + draw(length)
        calls.append(call)
    return drift, true, calls


@settings(deadline=None)
@given(runs())
def test_clocks(tmp_path_factory, run):
    drift, true, calls = run
    path = tmp_path_factory.mktemp("trace") / "t.json"
    writer, before = TraceWriter(path, "cuda:0"), None
    done = 0
    for call in calls:
        writer.write(call, where)
        events = pieces(path)[done:]  # while it is open
        done += len(events)
        span = true[call[-1].back_end] - true[(before or call[0]).hand_start]
        drifted = span * abs(drift) / 1e6
        for made in call:
            follows = before is not None and made.position == before.position + 1
            wanted = of(made, before if follows else None)
            shown = {e["name"]: e for e in events if e["args"]["entry"] == made.number}
            assert lengths(shown.values()) == {
                name: end - start for name, (start, end) in wanted.items() if start
            }
            width = (made.seen - made.hand_end) - (made.rung - made.back_ready)
            width = max(width, 0)  # the drift may make the bounds cross
            for name, event in shown.items():
                start = wanted[name][0]
                if LANE_OF[name] == CPU:
                    assert nanoseconds(event["ts"]) == start
                else:
                    assert abs(nanoseconds(event["ts"]) - true[start]) <= width + drifted + 3
            before = made
    writer.close()


def test_clocks_that_cross_and_records_that_say_little(tmp_path):
    """The middle of crossed bounds; one bound only moves the last offset if it must."""
    full = dict(hand_start=90, hand_end=100, back_start=150, back_ready=200, back_end=210)
    calls = [
        [dict(seen=1090, rung=1210)],  # at most 990, at least 1010: 1000
        [dict()],  # as before
        [dict(seen=1200)],  # at most 1100
        [dict(seen=1050)],  # at most 950
        [dict(rung=1100)],  # at least 900
        [dict(rung=1180)],  # at least 980
        [dict(seen=1300, rung=1190), dict(seen=1110, rung=1170)],  # 990 to 1010
    ]
    path = tmp_path / "t"
    writer, offsets = TraceWriter(path, "cuda:0"), []
    for call in calls:
        writer.write([record(**full, **times) for times in call], where)
        offsets.append(nanoseconds(pieces(path)[-1]["ts"]) - 150)
    assert offsets == [1000, 1000, 1000, 950, 950, 980, 1000]


def test_a_record_that_comes_late_says_nothing_of_now(tmp_path):
    """As the last prompt's does, with the first decode steps after the next prompt."""
    path, clock = tmp_path / "t", lambda t: t + t // 10**5  # 10 us in a second
    (late, _), (now, _) = batch(10**11, clock, number=1), batch(4 * 10**11, clock, number=2)
    TraceWriter(path, "cuda:0").write([late, now], where)
    start = nanoseconds(pieces(path)[-1]["ts"])
    assert abs(start - (4 * 10**11 + 34_000)) < 5000  # of its wait


def test_without_any_bound_the_gpu_is_left_out(tmp_path):
    path = tmp_path / "t"
    made = batch(10_000)[0]._replace(seen=0, rung=0)
    TraceWriter(path, "cuda:0").write([made], where)
    assert lengths(pieces(path)) == {"experts": 50_000}


@pytest.mark.parametrize("missing", [n for n in Record._fields if batch(1, late=1)[0]._asdict()[n]])
def test_what_is_missing_is_left_out(tmp_path, missing):
    made = batch(10_000, late=5000)[0]
    lacks = made._replace(**{missing: 0})
    writer = TraceWriter(tmp_path / "t", "cuda:0")
    writer.write([made, lacks], where)
    shown = lengths(pieces(tmp_path / "t")[len(of(made)) :])
    expected = {name: end - start for name, (start, end) in of(lacks).items() if start and end}
    assert shown == expected


def test_negative_times_are_left_out(tmp_path):
    made = record(
        hand_start=100,
        hand_end=90,
        seen=100,
        rung=101,
        begun=50,
        ended=50,
        back_start=80,
        back_ready=200,
        back_end=201,
    )
    TraceWriter(tmp_path / "t", "cuda:0").write([made], where)
    assert lengths(pieces(tmp_path / "t")) == {
        "experts": 0,
        "wait for the CPU": 120,
        "take back": 1,
    }


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({}, True),
        ({"chain": 1}, False),
        ({"position": 2}, False),
        ({"position": 0}, False),
        ({"number": 9}, False),
    ],
)
def test_between_layers(tmp_path, change, shown):
    """Only of two layers that follow each other; also where two calls brought them."""
    first, end = batch(10_000, number=2**32 - 1, position=0)
    second = batch(end + 7000, number=0, position=1)[0]._replace(**change)
    writer = TraceWriter(tmp_path / "t", "cuda:0")
    writer.write([first], where)
    writer.write([second], where)
    assert lengths(pieces(tmp_path / "t")).get("between layers") == (7000 if shown else None)


# --- files


def filled(path, close=True):
    writer = TraceWriter(path, "cuda:0")
    for number in range(4):
        made, _ = batch(10_000 + 10**6 * number, number=number, position=number)
        writer.write([made], lambda slot: 'a "layer" of Müller')
    if close:
        writer.close()
    return writer


@pytest.mark.parametrize("closed", [True, False])
def test_a_cut_file(tmp_path, closed):
    filled(tmp_path / "t", closed)
    data, events = (tmp_path / "t").read_bytes(), read(tmp_path / "t")
    assert data.endswith(b"]\n") == closed
    assert events[-1]["args"]["layer"] == 'a "layer" of Müller'
    lost = set()
    for size in range(len(data) - 200, len(data)):
        (tmp_path / "cut").write_bytes(data[:size])
        found = read(tmp_path / "cut")
        assert found == events[: len(found)]
        lost.add(len(events) - len(found))
    assert max(lost) in (1, 2)  # events are of more than 100 bytes


def test_hardly_begun(tmp_path):
    for text in ("", "\n", "[", "[\n", "[]", '[\n{"name"', "[\n]"):
        (tmp_path / "t").write_text(text)
        assert read(tmp_path / "t") == []


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("hello", 1, '"["'),
        ("\n\n{}", 3, '"["'),
        ("[\n{},\n5,\n{}", 3, "not 5"),
        ('[\n{},\n{"a\n{}', 3, "JSON object"),
        ("[\n{}\n{}", 3, '","'),
        ("[\n{}\n]\n{}", 4, 'after "]"'),
        ("\x00\xff", 1, '"["'),
    ],
)
def test_no_trace(tmp_path, text, line, word):
    path = tmp_path / "t"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path}: line {line}: not a trace: ")
    assert word in str(raised.value)


def test_an_old_file_goes_and_nothing_happens_after_the_end(tmp_path):
    (tmp_path / "t").write_text("old")
    writer = filled(tmp_path / "t")
    data = (tmp_path / "t").read_bytes()
    writer.close()
    writer.write([batch(10_000)[0]], where)
    assert (tmp_path / "t").read_bytes() == data
    assert len(pieces(tmp_path / "t")) == 4 * 5 + 3


def test_two_devices_in_one_file(tmp_path):
    path = tmp_path / "t"
    writers = [TraceWriter(path, f"cuda:{n}") for n in range(2)]
    for number in range(3):
        for writer in writers:
            writer.write([batch(10_000, number=number)[0]], where)
    writers[0].close()
    writers[1].write([batch(10_000, number=3)[0]], where)
    writers[1].close()
    events = json.loads(path.read_text())
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"]
    assert [name for _, name in names] == ["cuda:0", "cuda:1"]
    waits = [event["pid"] for event in events if event["name"] == "wait for the CPU"]
    assert [waits.count(pid) for pid, _ in names] == [3, 4]
    TraceWriter(path, "cuda:2").close()
    assert [e["args"]["name"] for e in read(path) if e["name"] == "process_name"] == ["cuda:2"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no/such/folder", "No such file or directory"),
        ("", "exists and is not a regular file"),
        ("a\0b", "null"),
        ("/dev/full", "exists and is not a regular file"),
        ("/dev/stdout", "exists and is not a regular file"),  # even if it is a file
        ("pipe", "exists and is not a regular file"),  # rather than wait until somebody reads it
        ("read pipe", "exists and is not a regular file"),
    ],
)
def test_a_file_that_cannot_be_written(tmp_path, caplog, name, reason):
    path = os.path.join(tmp_path, name)
    reader = None
    if "pipe" in name:
        os.mkfifo(path)
        if "read" in name:
            reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with caplog.at_level(logging.WARNING, "kt_kernel.trace"):
        filled(path)
    (warning,) = caplog.records
    assert warning.name == "kt_kernel.trace"
    for word in ("KT_TRACE", os.path.normpath(path), reason):
        assert word in warning.getMessage()
    if reader is not None:
        os.close(reader)


def test_a_file_that_was_full_once(tmp_path, caplog, monkeypatch):
    """The warning comes when it fails; what was there before is still a trace."""
    writer = filled(tmp_path / "t", close=False)
    events = read(tmp_path / "t")

    class Full:
        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(writer, "_file", Full())
    for _ in range(2):
        writer.write([batch(10_000)[0]], where)
    writer.close()
    assert len(caplog.records) == 1 and read(tmp_path / "t") == events


def test_no_torch():
    code = (
        "import sys, kt_kernel.trace.writer, kt_kernel.trace.reader, kt_kernel.trace.summary;"
        "assert 'torch' not in sys.modules"
    )
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
