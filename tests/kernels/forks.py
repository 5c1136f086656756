"""For the programs of tests that fork."""

from __future__ import annotations

import os
import time


def join_child(child: int, turn: int, seconds: float) -> None:
    """Waits for a child; ends this process, with a line that says why, where it hangs or fails."""
    end = time.monotonic() + seconds
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
            print("hung in turn", turn, flush=True)
            os._exit(100)
        time.sleep(0.001)
    if done[1]:
        print("child ended with", done[1], flush=True)
        os._exit(101)
