"""Starts an engine's processes in a group of their own, waits for them, and ends them together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ..runtime.signals import left_by_signals
from . import server_guard

# The servers are local, so proxies named in the environment are not used.
local_http = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class ServerFailed(Exception):
    """A server exited, or did not answer in time."""


@contextmanager
def process_group(
    command: Sequence[str | os.PathLike[str]],
    log: Path,
    env: Mapping[str, str] | None = None,
    patience: float = 15,
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command and writes its output to ``log``. When the block ends, or this process is
    killed, none of its processes runs.

    Engines start processes that may outlive the first one, so all of them are ended: by SIGTERM,
    and by SIGKILL after ``patience`` seconds. The process that is yielded is the guard that does
    this (``server_guard.py``): it leads the group, and ends when and as the command does, with code
    127 if the command cannot be started. The block is one of `left_by_signals`, and in the main
    thread, SIGINT does not interrupt ending the group.
    """
    catches = threading.current_thread() is threading.main_thread()
    with left_by_signals():
        with open(log, "wb") as output:
            process = subprocess.Popen(
                _guarded(command, patience),
                stdin=subprocess.PIPE,  # the guard waits for its end
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN) if catches else None
            assert process.stdin is not None
            process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience + server_guard.KILLING)
            end_group(process.pid, 0)  # nothing, unless the guard was killed
            process.wait()
            if catches:
                signal.signal(signal.SIGINT, interrupt)


def run_guarded(
    command: Sequence[str | os.PathLike[str]],
    env: Mapping[str, str] | None = None,
    patience: float = 15,
) -> int:
    """Runs a command with this process's output, and returns its exit code. If this process is
    killed, none of the command's processes runs any longer; see `process_group`. SIGINT of a
    terminal is left to the command."""
    given = _guarded(command, patience)
    with subprocess.Popen(given, env=env, stdin=subprocess.PIPE) as process:
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return process.wait()
        finally:
            signal.signal(signal.SIGINT, previous)


def _guarded(
    command: Sequence[str | os.PathLike[str]], patience: float
) -> list[str | os.PathLike[str]]:
    return [sys.executable, "-I", "-S", server_guard.__file__, str(patience), *command]


def end_group(group: int, patience: float = 15) -> None:
    """Ends all processes of a group.

    Sends SIGTERM first, and SIGKILL to processes that still run after ``patience`` seconds. Returns
    when none of them runs. Raises RuntimeError if that takes 15 more seconds, as with a process
    that waits for a device.
    """
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 15)):
        with suppress(ProcessLookupError):
            os.killpg(group, number)
        end = time.monotonic() + seconds
        while _runs(group):
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"process group {group} cannot be killed")


def cpu_seconds(group: int) -> float:
    """That the processes of a group and their ended children have used."""
    # proc(5): utime, stime, cutime, cstime
    ticks = sum(int(field) for process in _of_group(group) for field in process[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _runs(group: int) -> bool:
    """Whether a process of the group runs. Zombies do not: their parents may never reap them."""
    return any(process[0] not in "ZX" for process in _of_group(group))


def _of_group(group: int) -> Iterator[list[str]]:
    return (about for _, about in server_guard.processes() if int(about[2]) == group)


def wait_until_healthy(
    server: subprocess.Popen[bytes],
    url: str,
    timeout: float,
    waiting: Callable[[float], None] = lambda seconds: None,
) -> float:
    """Waits until ``url``/health answers with status 200; returns how many seconds it took.

    ``waiting`` is called about once a second with the seconds so far. Raises ServerFailed if the
    process exits first, or after ``timeout`` seconds without an answer.
    """
    start = time.monotonic()
    while True:
        elapsed = time.monotonic() - start
        if server.poll() is not None:
            raise ServerFailed(f"the server exited with code {server.returncode}")
        if elapsed > timeout:
            raise ServerFailed(f"the server did not answer within {timeout:.0f} s")
        with (
            suppress(urllib.error.URLError, OSError),
            local_http.open(f"{url}/health", timeout=2) as response,
        ):
            if response.status == 200:
                return elapsed
        waiting(elapsed)
        time.sleep(1)


def free_port() -> int:
    """A TCP port of this machine that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
