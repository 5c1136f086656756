"""Process groups end with everything in them, and servers are waited for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from kt_kernel.serving import server_guard
from kt_kernel.serving.server_process import (
    ServerFailed,
    free_port,
    local_http,
    process_group,
    wait_until_healthy,
)

# Starts two processes, of which one ignores SIGTERM, says who they are, and waits or ends.
FAMILY = """
import os, signal, subprocess, sys, time
read, write = os.pipe()
children = [subprocess.Popen([sys.executable, "-c", program], pass_fds=[write]) for program in (
    "import time; time.sleep(600)",
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    f"os.write({write}, b'deaf'); time.sleep(600)",
)]
os.read(read, 4)
# A daemon, which has another parent and another session.
if os.fork() == 0:
    os.setsid()
    if (daemon := os.fork()) == 0:
        time.sleep(600)
    os.write(write, str(daemon).encode())
    os._exit(0)
os.wait()
daemon = int(os.read(read, 9))
print("family", os.getpid(), *(child.pid for child in children), daemon, flush=True)
if sys.argv[1] == "waits":
    time.sleep(600)
"""
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def family(log: Path) -> list[int]:
    """The processes, once all of them are up."""
    for _ in range(600):
        lines = log.read_text().splitlines() if log.exists() else []
        if lines:
            assert lines[0].startswith("family"), lines
            return [int(number) for number in lines[0].split()[1:]]
        time.sleep(0.05)
    raise AssertionError(log.read_text())


def running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("leader", ["waits", "ends"])
def test_nothing_of_a_group_is_left(leader: str, tmp_path: Path) -> None:
    """Neither of a group whose first process is gone already, nor of one that was told to stay."""
    log = tmp_path / "log"
    with process_group([sys.executable, "-c", FAMILY, leader], log, patience=1) as process:
        everyone = family(log)
        if leader == "ends":  # the guard then ends the others
            process.wait(30)
        else:
            assert os.getpgid(everyone[1]) == process.pid and all(map(running, everyone))
    assert not any(map(running, everyone))


def test_a_group_ends_with_an_exception(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with (
        pytest.raises(ZeroDivisionError),
        process_group(SLEEP, tmp_path / "log") as process,
    ):
        _ = 1 / 0
    assert process.returncode == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_closed_terminal_is_ignored_with_nohup(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with process_group(SLEEP, tmp_path / "log"):
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


PARENT = """
import signal, sys, time
from pathlib import Path
from kt_kernel.serving.server_process import process_group

# A shell's background jobs, and what they start, ignore it; and nohup's the other one.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

with process_group([sys.executable, "-c", sys.argv[1], "waits"], Path(sys.argv[2]), patience=1):
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM),
        (signal.SIGHUP, 128 + signal.SIGHUP),
        (signal.SIGINT, -signal.SIGINT),
        (signal.SIGKILL, -signal.SIGKILL),  # after which the parent cannot do anything
    ],
)
def test_a_group_ends_with_its_parent(number: signal.Signals, code: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, FAMILY, str(log)], stderr=subprocess.DEVNULL
    )
    everyone = family(log)
    os.kill(parent.pid, number)
    assert parent.wait(30) == code
    if number == signal.SIGKILL:
        wait_for_the_end(everyone)
    assert not any(map(running, everyone))


RUNS = """
import sys
from kt_kernel.serving.server_process import run_guarded

sys.exit(run_guarded([sys.executable, "-c", *sys.argv[1:]], patience=1))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_is_run_to_its_end(number: signal.Signals, tmp_path: Path) -> None:
    """As the demo's training: it has this process's output, and ends if this process is killed."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", RUNS]
    with open(log, "wb") as output:
        parent = subprocess.Popen([*command, FAMILY, "waits"], stdout=output)
    everyone = family(log)
    os.kill(parent.pid, number)
    assert parent.wait(30) == -number
    wait_for_the_end(everyone)
    assert not any(map(running, everyone))
    assert subprocess.run([*command, "raise SystemExit(3)"], timeout=30).returncode == 3


def wait_for_the_end(everyone: list[int]) -> None:
    end = time.monotonic() + 20
    while any(map(running, everyone)) and time.monotonic() < end:
        time.sleep(0.05)


def test_a_parent_that_is_gone_before_the_start(tmp_path: Path) -> None:
    """The guard notices it, whenever it happens."""
    log = tmp_path / "log"
    command = [sys.executable, "-I", "-S", server_guard.__file__, "0", *SLEEP]
    with open(log, "wb") as output:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, timeout=30)
    assert done.returncode in (-signal.SIGTERM, -signal.SIGKILL)


def test_a_killed_guard(tmp_path: Path) -> None:
    """As by a lack of memory: its group is ended by the parent."""
    log = tmp_path / "log"
    with process_group([sys.executable, "-c", FAMILY, "waits"], log, patience=1) as process:
        *everyone, daemon = family(log)
        os.kill(process.pid, signal.SIGKILL)
    assert not any(map(running, everyone)) and process.returncode == -signal.SIGKILL
    os.kill(daemon, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_the_guard_ends_as_the_command(number: signal.Signals, tmp_path: Path) -> None:
    """Also by SIGKILL, with which SGLang ends its own processes; the log has nothing of the
    guard."""
    log = tmp_path / "log"
    program = f"import os; print('why', flush=True); os.kill(os.getpid(), {number.value})"
    with process_group([sys.executable, "-c", program], log) as process:
        assert process.wait(30) == -number
    assert log.read_text() == "why\n"


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process_group([str(tmp_path / "absent")], log) as process:
        assert process.wait(30) == 127
    assert log.read_text() == f"{tmp_path / 'absent'}: No such file or directory\n"


@contextmanager
def server(*statuses: int) -> Iterator[str]:
    """Answers with these, the last one again and again; requests for other paths get a 404."""
    left = [*statuses]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    found = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=found.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{found.server_port}"
    finally:
        found.shutdown()
        thread.join()
        found.server_close()


def test_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the status is 200; a proxy is not asked."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    told: list[float] = []
    with process_group(SLEEP, tmp_path / "log") as process, server(503, 204, 200) as url:
        assert wait_until_healthy(process, url, 30, told.append) >= told[-1]
    assert len(told) == 2


def test_waiting_in_vain(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with (
        process_group(SLEEP, tmp_path / "log") as process,
        pytest.raises(ServerFailed, match="did not answer within 0 s"),
    ):
        wait_until_healthy(process, url, 0)
    with (
        process_group([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log") as process,
        pytest.raises(ServerFailed, match="exited with code 3"),
    ):
        wait_until_healthy(process, url, 60)


def test_local_http_takes_other_paths() -> None:
    with server(200) as url, pytest.raises(OSError, match="404"):
        local_http.open(f"{url}/elsewhere", timeout=10)
