"""Uploads and copies through the driver, each by one call, with a library of ours in its place."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from typing import Any

import numpy as np
import pytest
from fake_driver import state
from kernels.compiling import build_fake_driver
from kernels.core import SMALL_SWEEP, module

from kt_kernel import _C

core: Any = module("_C_emul") if SMALL_SWEEP else _C  # the sanitized one


class Driver:
    """The stand-in, as it is at the begin of each test: copies are made at once, and events have
    occurred."""

    def __init__(self, library: str) -> None:
        self.library, self._state = library, ctypes.CDLL(library)
        self.last, self.result = state(library, "pipp")
        self.calls()
        for name, value in {"failing": -1, "copying": 1, "copies": 0}.items():
            self.number(name).value = value
        self.long("reached").value = 2**64 - 1
        self.long("context").value = 0x77

    def number(self, name: str) -> Any:
        return ctypes.c_int.in_dll(self._state, name)

    def long(self, name: str) -> Any:
        return ctypes.c_uint64.in_dll(self._state, name)

    def calls(self) -> str:
        """Letters of the calls since the last question."""
        text = (ctypes.c_char * 256).in_dll(self._state, "calls")
        called = self.number("called")
        found = text.raw[: called.value].decode()
        called.value = 0
        return found


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_fake_driver(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def driver(library: str) -> Driver:
    return Driver(library)


class Case:
    """Two experts in host memory, memory for one on the "device", and a kernel."""

    def __init__(self, driver: Driver) -> None:
        self.context = core.CudaContext(library=driver.library)
        self.queue = core.UploadQueue(self.context, 2**48)
        self.experts = np.arange(2 * 64, dtype=np.uint8).reshape(2, 64)
        self.staged = np.zeros(64, np.uint8)
        self.kernel = core.KernelLaunch(0x1234, 128, 512, "pipp", library=driver.library)

    def upload(self, expert: int, *launches: Any) -> Any:
        """In two parts."""
        to, source = self.staged.ctypes.data, self.experts[expert].ctypes.data
        return [(to, source, 40), (to + 40, source + 40, 24)], list(launches)

    def launch(self, slot: int) -> Any:
        return self.kernel.bind((2, 3, 4), 0x1000 * slot, slot, 0, 0)


def test_an_upload(driver: Driver) -> None:
    """Its copies, its launches, and an event, in this order and on the stream."""
    case = Case(driver)
    assert case.queue.completed() == 0 and driver.calls() == ""
    assert case.queue.start([case.upload(1, case.launch(5), case.launch(6))]) == 1
    assert driver.calls() == "CCLLER"
    assert np.array_equal(case.staged, case.experts[1])
    assert driver.number("flags_of_events").value == 2  # without times
    last = driver.last
    found = last.function, last.stream, list(last.grid), list(last.block), last.shared
    assert found == (0x1234, 2**48, [2, 3, 4], [128, 1, 1], 512)
    assert list(last.values)[:4] == [0x6000, 6, 0, 0]
    assert driver.long("recorded_on").value == 2**48 and driver.long("launched_in").value == 0x77
    assert case.queue.completed() == 1 and driver.calls() == "Q"
    case.queue.wait()
    assert driver.calls() == "S"


def test_uploads_complete_one_after_the_other(driver: Driver) -> None:
    """Events are used again: there are as many as uploads were under way."""
    case, reached = Case(driver), driver.long("reached")
    before, alive = driver.long("recorded").value, driver.number("events").value
    for turn in range(3):
        reached.value = before
        assert case.queue.start([case.upload(n % 2) for n in range(4)]) == 4 * (turn + 1)
        for done in range(5):
            reached.value = before + done
            assert case.queue.completed() == 4 * turn + done
        before += 4
    assert driver.number("events").value == alive + 4
    reached.value = before
    case.queue.start([case.upload(0)])
    del case
    gc.collect()
    assert driver.number("events").value == alive
    assert driver.calls().endswith("DDDD")


def test_launches_live_until_they_are_queued(driver: Driver) -> None:
    case = Case(driver)
    given = [case.upload(0, case.launch(n)) for n in range(20)]
    case.kernel = None
    gc.collect()
    assert case.queue.start(given) == 20
    assert list(driver.last.values)[:2] == [0x1000 * 19, 19]


@pytest.mark.parametrize(
    ("letter", "call"),
    [
        ("C", "cuMemcpyHtoDAsync"),
        ("L", "cuLaunchKernel"),
        ("E", "cuEventCreate"),
        ("R", "cuEventRecord"),
        ("Q", "cuEventQuery"),
        ("S", "cuStreamSynchronize"),
    ],
)
def test_each_call_that_fails(driver: Driver, letter: str, call: str) -> None:
    """The error names it. What was started before is under way, and what follows works."""
    case, failing = Case(driver), driver.number("failing")

    def everything() -> None:
        case.queue.start([case.upload(0, case.launch(1)), case.upload(1, case.launch(2))])
        case.queue.completed()
        case.queue.wait()

    everything()
    assert driver.calls() == "CCLERCCLERQQS"
    idle = "CCLRCCLRQQS"  # there are events now
    for at in [i for i, each in enumerate(idle) if each == letter]:
        failing.value = at
        with pytest.raises(RuntimeError, match=f"^{call} failed: CUDA_ERROR_FAKE, something"):
            everything()
        assert driver.calls() == idle[: at + 1]
        failing.value = -1
        case.queue.completed()
        driver.calls()
    if letter == "E":
        fresh = Case(driver)
        failing.value = 3
        with pytest.raises(RuntimeError, match=f"^{call} failed"):
            fresh.queue.start([fresh.upload(0, fresh.launch(1))])
        failing.value = -1
        driver.calls()
    before = case.queue.completed()
    driver.calls()
    everything()
    assert driver.calls() == idle and case.queue.completed() == before + 2


@pytest.mark.parametrize(
    ("failing", "call"),
    [(0, "cuMemcpyHtoDAsync"), (2, "cuMemcpyDtoHAsync"), (3, "cuStreamSynchronize")],
)
def test_synced_copies(driver: Driver, failing: int, call: str) -> None:
    case, back = Case(driver), np.zeros(64, np.uint8)
    copies, _ = case.upload(1)
    there = [(back.ctypes.data, case.staged.ctypes.data, 64)]
    both = core.SyncedCopies(case.context, 7, to_device=copies, to_host=there)
    both.run()
    assert driver.calls() == "CCBS" and np.array_equal(back, case.experts[1])
    driver.number("failing").value = failing
    with pytest.raises(RuntimeError, match=f"^{call} failed: CUDA_ERROR_FAKE"):
        both.run()
    driver.number("failing").value = -1
    case.experts[1] += 1
    both.run()
    assert np.array_equal(back, case.experts[1])


def test_calls_are_made_in_the_context(driver: Driver) -> None:
    """Whatever is current in the thread, and that stays so."""
    case, current = Case(driver), driver.long("context")
    copies, launches = case.upload(0, case.launch(1))
    current.value = 0x99
    case.queue.start([(copies, launches)])
    case.queue.completed()
    core.SyncedCopies(case.context, 0, to_device=copies, to_host=copies).run()
    assert driver.long("launched_in").value == 0x77
    assert (driver.number("pushes").value, current.value) == (0, 0x99)


def test_uploads_that_make_no_sense(driver: Driver) -> None:
    case = Case(driver)
    left_open = case.kernel.bind(1, 0, None, 0, 0)
    with pytest.raises(ValueError, match="open parameters"):
        case.queue.start([case.upload(0), case.upload(0, left_open)])
    with pytest.raises(ValueError, match="a grid of 1 x 65536 x 1 blocks; accepted: 1 to 2147"):
        case.kernel.bind((1, 65536, 1), 0, 0, 0, 0)
    assert driver.calls() == ""


def test_another_thread_waits_for_news(driver: Driver) -> None:
    """For an upload, for the word, or for the time; Python goes on meanwhile."""
    case, passed = Case(driver), np.zeros(1, np.int64)
    driver.long("reached").value = driver.long("recorded").value
    case.queue.start([case.upload(0)])
    woken: list[str] = []

    def wait(name: str, least: float, queue: Any, completed: int = 0) -> threading.Thread:
        def run() -> None:
            core.wait_for_news(1e-3, least, 60.0, passed, 0, queue, completed)
            woken.append(name)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    upload = wait("upload", 60.0, case.queue)
    driver.long("reached").value += 1
    upload.join(30)
    word = wait("word", 0.0, None)
    passed[0] = 1
    word.join(30)
    for name, queue, completed in (("too early", None, 0), ("known already", case.queue, 1)):
        wait(name, 0.05, queue, completed).join(30)  # until then, the word does not matter
    assert woken == ["upload", "word", "too early", "known already"]


@pytest.mark.skipif(SMALL_SWEEP, reason="the sanitizers do not follow forks")
def test_a_child_has_no_uploads(driver: Driver) -> None:
    """It leaves the parent's events alone, and calls raise an error."""
    case, events = Case(driver), driver.number("events")
    case.queue.start([case.upload(0)])
    before = events.value
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for call in (lambda: case.queue.start([]), case.queue.completed, case.queue.wait):
                with pytest.raises(RuntimeError, match="child made by fork"):
                    call()
            del case
            gc.collect()
            status = 0 if events.value == before else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert case.queue.completed() == 1
