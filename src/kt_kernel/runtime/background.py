"""Threads beside the main one that end before Python does.

While Python ends, it ends every thread that comes back from compiled code. In C++ this aborts the
process: "terminate called without an active exception". It concerns each operation of torch and of
the compiled core that lets other threads run, so a daemon thread must not be left to it.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable

_ends: dict[threading.Thread, Callable[[], object]] = {}  # of the threads that run


def start_thread(
    name: str, run: Callable[[], object], end: Callable[[], object]
) -> threading.Thread:
    """Starts a thread that does not keep the process alive.

    run: the thread's work. end: called from another thread when the process ends, if the work is
    not done; `run` has to return soon after, and the process waits for it.

    Raises RuntimeError if the system has no thread left.
    """

    def work() -> None:
        try:
            run()
        finally:
            _ends.pop(threading.current_thread(), None)

    thread = threading.Thread(target=work, name=name, daemon=True)
    _ends[thread] = end
    try:
        thread.start()
    except RuntimeError:  # it never ran, so nothing may wait for it
        del _ends[thread]
        raise
    return thread


def _end_all() -> None:
    running = list(_ends.items())
    for _, end in running:
        end()
    for thread, _ in running:
        thread.join()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_ends.clear)
