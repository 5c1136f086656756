"""Threads beside the main one: a process ends well while they are in compiled code."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest
from kernels.forks import run_program

import kt_kernel
from kt_kernel.runtime import background
from kt_kernel.runtime.background import start_thread

BEGIN = """
import threading, time
import torch

numbers = torch.arange(8.0)

def busy(ending):
    while not ending.is_set():
        numbers.sum().item()  # lets other threads run
"""
# Without an end before Python's, the first, second and fourth abort nearly every time.
WORK = {
    "any": """
from kt_kernel.runtime.background import start_thread

ending = threading.Event()
start_thread("test", lambda: busy(ending), ending.set)
""",
    "reading ahead, not closed": """
from kt_kernel.checkpoint.ahead import read_ahead

read = read_ahead(range(1 << 30), lambda key: numbers.sum().item(), lambda _: 0)
print(next(read))
""",
    "recording": """
from kt_kernel.routes.model import RoutedModel
from kt_kernel.serving import recording
from kt_kernel.serving.options import KTOptions

recording.LOOK_SECONDS = 0
options = KTOptions(record_kt_gpu_expert_distribution=FILE)
made = recording.ModelRecording(options, RoutedModel("test", 1, 4, 2, 0, 0))
made.add_layer(0).add(torch.zeros(3, 2, dtype=torch.int64), None)
made.start(options)
""",
    "counters": """
import logging
from kt_kernel.serving import report

class Model:
    elsewhere = False
    layers = ()
    describe = lambda self: "a model"
    describe_loading = lambda self: []
    stats = lambda self: {"expert_calls": numbers.sum().item()}

report.LOOK_SECONDS = 0
model = Model()
report.watch(model, logging.getLogger())
""",
    "trace": """
import os
os.environ["KT_TRACE"] = FILE
from kt_kernel.device import tracer

class Core:
    def take_trace(self):
        numbers.sum().item()
        return []

tracer._SECONDS = 0
tracer.tracer_of(torch.device("cpu")).attach(Core())
""",
}


@pytest.mark.parametrize("work", WORK)
def test_python_ends_while_a_thread_works(work: str, tmp_path: Path):
    code = f"{BEGIN}{WORK[work]}\ntime.sleep(0.2)\nprint('fine', flush=True)\n"
    run_program(code.replace("FILE", repr(str(tmp_path / "file"))))


def test_a_thread_that_is_done_is_not_asked_to_end():
    thread = start_thread("test", lambda: None, lambda: None)
    thread.join()
    assert thread not in background._ends


def test_a_thread_that_cannot_be_started_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    before = dict(background._ends)
    monkeypatch.setattr(threading, "_start_new_thread", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_thread("test", lambda: None, lambda: None)
    assert background._ends == before


def test_all_threads_of_the_package_are_started_here():
    """There is no other daemon thread, see the module. Python itself waits for threads that are
    none."""
    package = Path(kt_kernel.__file__).parent
    found = {
        os.fspath(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(r"Thread\([^)]*daemon=True|\.daemon = True", path.read_text())
    }
    assert found == {"runtime/background.py"}
