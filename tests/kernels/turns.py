"""Measures whether other Python threads run while a thread is inside the compiled core."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable


def turns_during(work: Callable[[], object]) -> int:
    """The number of turns, of a millisecond each, that this thread gets while another runs
    ``work``.

    At most two if the core holds the GIL. The work must take some 20 ms.
    """
    span: list[float] = []
    failed: list[BaseException] = []

    def timed() -> None:
        start = time.monotonic()
        try:
            work()
        except BaseException as error:
            failed.append(error)
        span.extend((start, time.monotonic()))

    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # no thread is asked to release the GIL
    try:
        thread = threading.Thread(target=timed)
        thread.start()
        turns = []
        while thread.is_alive():
            turns.append(time.monotonic())
            time.sleep(0.001)
        thread.join()
    finally:
        sys.setswitchinterval(before)
    if failed:
        raise failed[0]
    assert span[1] - span[0] > 0.02, f"it took {span[1] - span[0]:.3f} s, too short to tell"
    return sum(span[0] < turn < span[1] for turn in turns)
