"""Signals that end a process."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def left_by_signals() -> Iterator[None]:
    """In the main thread, SIGTERM to this process, or the SIGHUP of a terminal that is closed,
    leaves the block with SystemExit and 128 plus the signal's number. Otherwise it would end the
    process, and temporary folders, locks and files that are half written would stay."""
    previous = {}
    main = threading.current_thread() is threading.main_thread()
    for number in (signal.SIGTERM, signal.SIGHUP) if main else ():
        # nohup ignores SIGHUP, so that commands survive the terminal.
        if number == signal.SIGTERM or signal.getsignal(number) != signal.SIG_IGN:
            previous[number] = signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)
