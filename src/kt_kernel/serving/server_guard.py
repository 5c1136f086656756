"""Stands between a program and its server, and ends the server if the program ends in any way.

    python -I -S server_guard.py PATIENCE COMMAND [ARGUMENT ...]

The program holds the other end of the guard's standard input, and writes nothing. When that end is
closed, also by the kernel because the program was killed, the guard ends everything that the
command has started: by SIGTERM, and by SIGKILL after PATIENCE seconds. The same happens to what is
left when the command itself ends, and after SIGTERM. Then the guard ends as the command did.

Processes whose parents have ended become children of the guard, so it finds all of them, whatever
group or session they have moved to. It runs as a file, so it may import the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

KILLING = 15.0  # seconds that processes may take to end after SIGKILL
_LOOK = 0.05  # seconds
_NOT_STARTED = 127  # as shells say it
_SET_DUMPABLE, _SET_CHILD_SUBREAPER = 4, 36  # prctl(2)


def processes() -> Iterator[tuple[int, list[str]]]:
    """The number of each process of the system, and what /proc says of it, from its state on."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue  # it has just ended
        # proc(5): pid (name) state ppid pgrp; the name may hold any character
        yield int(stat.parent.name), text.rpartition(")")[2].split()


def main(patience: float, command: list[str]) -> int:
    """Returns the code with which to end."""
    _prctl(_SET_CHILD_SUBREAPER, 1)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    # An interrupt of the terminal also reaches the command, which decides what to do. The guard
    # does not ignore it, because the command would inherit that; it does not inherit a handler.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_STARTED
    while server.returncode is None and not told:
        if select.select([sys.stdin], [], [], _LOOK)[0]:
            break
        _reap(server)
    _end_all(server, patience)
    return server.wait()


def _end_all(server: subprocess.Popen[bytes], patience: float) -> None:
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, KILLING)):
        end, sent = time.monotonic() + seconds, set[int]()
        while True:
            _reap(server)
            found = _descendants()
            if not found:
                return
            for process in found - sent:
                with suppress(ProcessLookupError):
                    os.kill(process, number)
            sent |= found
            if time.monotonic() > end:
                break
            time.sleep(_LOOK)


def _reap(server: subprocess.Popen[bytes]) -> None:
    """Collects children that have ended: the server, and those that it left behind."""
    what = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, what)) is not None:
            if found.si_pid == server.pid:
                server.poll()
            else:
                os.waitpid(found.si_pid, 0)


def _descendants() -> set[int]:
    """All running processes below this one."""
    parents = {number: int(about[1]) for number, about in processes() if about[0] not in "ZX"}
    found: set[int] = set()
    new = {os.getpid()}
    while new:
        new = {number for number, parent in parents.items() if parent in new}
        found |= new
    return found


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_like(code: int) -> None:
    """Ends this process with a code, or by a signal, if the code is negative."""
    if code < 0:
        _prctl(_SET_DUMPABLE, 0)  # the server's core dump is enough
        if -code != signal.SIGKILL:  # it has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(abs(code))


if __name__ == "__main__":
    _end_like(main(float(sys.argv[1]), sys.argv[2:]))
