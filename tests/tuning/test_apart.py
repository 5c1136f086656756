"""Functions in a process of their own."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from kt_kernel.runtime import gpu
from kt_kernel.tuning.apart import Apart


def add(a: int, b: int) -> tuple[int, int]:
    return a + b, os.getpid()


def fail(error: Exception) -> None:
    raise error


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def say_so(file: Path) -> None:
    file.touch()
    time.sleep(60)


def test_calls_errors_and_the_end(tmp_path: Path) -> None:
    """In one test, because a process takes seconds to start."""
    with Apart() as apart:
        total, first = apart(add, 1, 2)
        assert total == 3 and first != os.getpid()
        with pytest.raises(torch.OutOfMemoryError, match="too much"):
            apart(fail, torch.OutOfMemoryError("too much"))
        with pytest.raises(RuntimeError, match="Unpicklable: 1 and 2"):
            apart(fail_with, 1, 2)
        assert apart(add, 3, 4) == (7, first)
    assert not Path(f"/proc/{first}").exists()
    begin, file = time.monotonic(), tmp_path / "running"

    def interrupt() -> None:
        while not file.exists():
            time.sleep(0.02)
        signal.pthread_kill(main, signal.SIGINT)

    main = threading.main_thread().ident
    assert main is not None
    thread = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt), Apart() as apart:
        thread.start()
        apart(say_so, file)
    thread.join()
    assert time.monotonic() - begin < 50
    with (
        pytest.raises(ChildProcessError, match="code -9 in die: it may have been killed"),
        Apart() as apart,
    ):
        apart(die)


def fail_with(first: int, second: int) -> None:
    raise Unpicklable(first, second)


def test_memory_of_a_gpu_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_PROGRAM", "import sys; print(7, 9 + int(sys.argv[1]))")
    assert gpu.gpu_memory_from_outside() == gpu.GpuMemory(7, 9)
    assert gpu.gpu_memory_from_outside(4) == gpu.GpuMemory(7, 13)
    for program in ("raise SystemExit(1)", "print('none')"):
        monkeypatch.setattr(gpu, "_PROGRAM", program)
        assert gpu.gpu_memory_from_outside() is None
