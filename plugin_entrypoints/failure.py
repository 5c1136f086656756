"""Reports errors and confirmations from an engine's processes to the process that the user started.

An engine runs in several processes. If a worker fails to load a model, its log gets a traceback,
and the process that the user started only learns that a child has died. That process therefore
creates a small file and names it in the environment of its children (`listen`). A worker writes one
line to the file before it ends (`end`), and the first process ends with that line (`repeat`). A
worker that has loaded a model with our layers confirms it in the same way (`confirm`). Once the
engine has started, the file goes (`started`).
"""

import atexit
import contextlib
import logging
import os
import tempfile
import time
from multiprocessing import resource_tracker
from types import TracebackType
from typing import NoReturn

from kt_kernel.serving.flags import exit_with

# PID:FILE, set by the first process of an engine for its children. Not for users.
VARIABLE = "KT_FAILURE_FILE"
_PREFIX = "kt: error: "
_CONFIRMATION = "loaded"
_PATIENCE = 3.0  # seconds for a helper process to end


class StartError(RuntimeError):
    """An engine could not start. A command would have ended with the message."""


def listen() -> None:
    """Called before an engine starts its processes: creates the file, or empties that of an earlier
    engine. If it cannot be created, errors stay in the log of the process that raised them.
    """
    path = _file()
    if path is not None and _started_here():
        with contextlib.suppress(OSError):  # an engine started, or the temporary folder was cleared
            os.truncate(path, 0)
            return
    with contextlib.suppress(OSError):
        descriptor, path = tempfile.mkstemp(prefix="kt-moe-")
        os.close(descriptor)
        os.environ[VARIABLE] = f"{os.getpid()}:{path}"
        atexit.register(_remove, path, os.getpid())


def started() -> None:
    """Called in the process that created the file once its engine has started: removes the file,
    because such processes are often killed. The next `listen` creates another one."""
    path = _file()
    if path is not None and _started_here():
        _remove(path, os.getpid())


def end(error: Exception, engine: str, *, exits: bool = True) -> None:
    """Called in a process of the engine with the error that made its start fail.

    Returns if the engine's own code raised it. An error of ours is reported. It then becomes
    SystemExit in a child process, where a traceback would hide the line, and `StartError` in the
    process that the user started.

    Args:
        error: the error being handled.
        engine: the engine's import package.
        exits: whether other processes notice if this one exits here. Otherwise a child returns, and
            the engine handles the error.
    """
    ours = _of_ours(error, engine)
    if ours is None or isinstance(error, StartError):
        return
    line = _line(ours)
    _write(line)
    if not _in_child():
        raise StartError(line) from error
    if exits:
        raise SystemExit(line) from None


def repeat(command_line: bool = False) -> None:
    """Called when a process of the engine learns that another one has ended. Ends this process with
    the reported line; returns if there is none.

    command_line: the user started a command of the engine, so it ends without a traceback.
    """
    line = reported()
    if line:
        stop(line, command_line)


def stop(message: str, command_line: bool) -> NoReturn:
    """Ends a start with one line: by SystemExit in a command and its children, otherwise by
    `StartError`."""
    line = _line(RuntimeError(message))
    if command_line:
        _say_nothing_more()
    if command_line or _in_child():
        raise SystemExit(line) from None
    raise StartError(line) from None


def _say_nothing_more() -> None:
    """Silences this process and a helper process of Python, so that the line is the last output."""
    logging.disable(logging.CRITICAL)  # the engine logs how it ends its other processes
    # The helper reports leaked shared memory once its pipe is closed.
    tracker = getattr(resource_tracker, "_resource_tracker", None)
    descriptor, pid = getattr(tracker, "_fd", None), getattr(tracker, "_pid", None)
    if tracker is None or descriptor is None or pid is None:
        return
    tracker._fd = tracker._pid = None
    deadline = time.monotonic() + _PATIENCE
    with contextlib.suppress(OSError):
        os.close(descriptor)
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
            time.sleep(0.02)


def reported() -> str:
    """The line that a process of the engine ended with, "" if there is none."""
    return next((line for line in _lines() if line.startswith(_PREFIX)), "")


def confirm() -> None:
    """Called in a worker that has loaded its model with the plugin's layers."""
    _write(_CONFIRMATION)


def confirmed() -> int:
    """How many workers have confirmed since `listen`; -1 if there is no file for it."""
    return -1 if _file() is None else _lines().count(_CONFIRMATION)


def _line(error: BaseException) -> str:
    message = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    if not message.strip():
        message = type(error).__name__
    return str(exit_with(RuntimeError(message.removeprefix(_PREFIX).removeprefix("kt: "))))


def _write(line: str) -> None:
    path = _file()
    if path is None:
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(line + "\n")


def _lines() -> list[str]:
    path = _file()
    if path is None:
        return []
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


def _of_ours(error: BaseException, engine: str) -> BaseException | None:
    """The error in a chain of causes that our code raised, or that was raised below our code
    without engine code in between. If there are several, the first cause; if there is none,
    None."""
    found = None
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if _package_of(link.__traceback__, engine) == "kt_kernel":
            found = link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return found


def _package_of(traceback: TracebackType | None, engine: str) -> str:
    """The package of the innermost frame that belongs to us or to the engine; "" if none does."""
    package = ""
    while traceback is not None:
        name = str(traceback.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if name in ("kt_kernel", engine):
            package = name
        traceback = traceback.tb_next
    return package


def _file() -> str | None:
    return os.environ.get(VARIABLE, "").partition(":")[2] or None


def _started_here() -> bool:
    return os.environ.get(VARIABLE, "").partition(":")[0] == str(os.getpid())


def _in_child() -> bool:
    return VARIABLE in os.environ and not _started_here()


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid:
        with contextlib.suppress(OSError):
            os.unlink(path)
