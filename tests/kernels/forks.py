"""For the programs of tests that fork."""

from __future__ import annotations

import os
import time


def join_child(child: int, turn: int, seconds: float, accepted: tuple[int, ...] = (0,)) -> int:
    """Waits for a child and returns its exit code; ends this process, with a line that says why,
    where it hangs or ends with a code that is not accepted."""
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
