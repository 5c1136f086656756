"""kt tune notices what else uses the CPUs while it measures; its own servers do not count."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kt_kernel.runtime.machine import CpuTimes, allowed_cpus
from kt_kernel.serving.server_process import cpu_seconds, process_group
from kt_kernel.tuning import engine
from kt_kernel.tuning.disturbance import Disturbances
from kt_kernel.tuning.engine import Server

CPUS = len(allowed_cpus())
BUSY = "print(flush=True)\nwhile True: pass"


def during(*readings: CpuTimes) -> dict[str, str]:
    found, times = Disturbances(), iter(readings)
    with found.during("the CPU", lambda: next(times)):
        pass
    return found.found


def test_others_and_the_host() -> None:
    """In ten seconds, in parts of all CPUs."""
    begin = CpuTimes(busy=100.0, stolen=3.0, own=7.0, at=50.0)

    def after(own: float, others: float, stolen: float) -> dict[str, str]:
        busy = 10 * CPUS * (own + others)
        changed = {"busy": 100 + busy, "own": 7 + 10 * CPUS * own, "at": 60.0}
        return during(begin, replace(begin, stolen=3 + 10 * CPUS * stolen, **changed))

    assert after(own=0.9, others=0.05, stolen=0.0) == {}
    words = after(own=0.5, others=0.4, stolen=0.0)["the CPU"]
    assert words == "other processes used 40% of the CPUs during the measurement"
    assert "the host took 10% of the CPUs" in after(own=0.5, others=0.0, stolen=0.1)["the CPU"]


@pytest.fixture
def spinning(tmp_path: Path) -> Iterator[int]:
    """A process that computes; its number and its group's."""
    log = tmp_path / "log"
    with process_group([sys.executable, "-c", BUSY], log, patience=1) as process:
        while not log.read_text():
            time.sleep(0.01)
        yield process.pid


def test_a_servers_processes_count_as_own(spinning: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "cpu_times", lambda: CpuTimes(0.0, 0.0, 5.0, 0.0))
    server = Server("", 256, spinning)
    first = server.cpu_times().own
    end = time.monotonic() + 20
    while (now := server.cpu_times().own) < first + 0.2:
        assert time.monotonic() < end, (first, now)
        time.sleep(0.05)
    assert now < 5 + 25


def test_seconds_of_a_group_are_those_of_the_system(tmp_path: Path) -> None:
    """As counted for a child that has ended; its own children's count, too."""
    program = (
        "import subprocess, sys, time\n"
        "subprocess.run([sys.executable, '-c', 'for _ in range(3_000_000): pass'])\n"
        "print('done', flush=True); time.sleep(60)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    log = tmp_path / "log"
    with process_group([sys.executable, "-c", program], log, patience=5) as process:
        while not log.read_text():
            time.sleep(0.02)
        found = cpu_seconds(process.pid)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert found == pytest.approx(used, abs=0.06) and found > 0.05
