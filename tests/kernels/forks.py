"""Helpers for test programs that fork."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_program(program: str) -> None:
    """Runs a program in a separate interpreter. It must end by printing "fine"."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "fine" in done.stdout, done.stdout + done.stderr


def refused(call: Callable[[], object], text: str) -> bool:
    """Whether a call raises RuntimeError with such a text."""
    try:
        call()
    except RuntimeError as error:
        return text in str(error)
    return False


def join_child(child: int, turn: int, seconds: float, accepted: tuple[int, ...] = (0,)) -> int:
    """Waits for a child and returns its exit code. If the child hangs or ends with a code that is
    not accepted, prints the reason and ends this process."""
    end = time.monotonic() + seconds
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
            print("hung in turn", turn, flush=True)
            os._exit(100)
        time.sleep(0.001)
    code = os.waitstatus_to_exitcode(done[1])
    if code not in accepted:
        print("child ended with", code, "in turn", turn, flush=True)
        os._exit(101)
    return code
