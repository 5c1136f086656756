"""KT_TRACE, from the wrapper's calls to the file; the interpreter's GPU has no clock."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from interpreted import Interpreter
from test_hand_over import LAYERS, batch, model, streams

from kt_kernel.device import tracer
from kt_kernel.device.engine import DeviceEngine
from kt_kernel.trace.pieces import EXPERTS
from kt_kernel.trace.reader import read


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KT_TRACE", str(tmp_path / "trace.json"))
    return tmp_path / "trace.json"


def tracers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kt-trace"]


@pytest.mark.parametrize("seconds", [0.001, 100])
def test_every_batch_is_in_the_file(
    path: Path, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, with its layer's name, whether it was written meanwhile or at the end."""
    monkeypatch.setattr(tracer, "_SECONDS", seconds)
    engine, layers, passes = DeviceEngine(Interpreter()), model(hot=0), 3
    ways = streams(engine, layers)
    for number in range(passes):
        for layer, way in zip(layers, ways, strict=True):
            x, ids, weights = batch(4, number)
            one = x, ids.clamp(0, 5), weights  # each has something to compute
            layer._streams[torch.device("cpu")] = way
            layer.submit_forward(*one, 0)
            layer.sync_forward(x, 0)
    engine.stop()
    assert path.read_bytes().endswith(b"\n]\n") and not tracers()
    shown = [event for event in read(path) if event["name"] == EXPERTS]
    shown.sort(key=lambda event: event["args"]["entry"])
    assert [(event["args"]["entry"], event["args"]["layer"]) for event in shown] == [
        (1 + i, layers[i % LAYERS]._settings.where) for i in range(passes * LAYERS)
    ]
    assert {event["args"]["tokens"] for event in shown} == {4}


def test_an_engine_that_cannot_be_made_leaves_no_tracer(path: Path) -> None:
    class Unpinned(Interpreter):
        def pin(self, buffer: object) -> None:
            raise RuntimeError("cannot be pinned")

    with pytest.raises(RuntimeError, match="cannot be pinned"):
        DeviceEngine(Unpinned())
    assert not tracers() and not path.exists()
