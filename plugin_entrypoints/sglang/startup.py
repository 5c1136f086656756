"""SGLang plugin: ends a failed start with one line, whichever process found the error.

A scheduler that cannot load the model logs a traceback and gets the main process killed. An error
of our code is instead reported to the main process, which stops its other processes and ends with
that line: a command exits, and ``Engine(...)`` raises.
"""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from .. import failure
from .contract import CONTRACT
from .hooks import Hook

_starting = False  # an engine with kt options
_command_line = False  # a failed start ends the process
# Child processes and socket contexts from before the start.
_others: set[multiprocessing.process.BaseProcess] = set()
_contexts: weakref.WeakSet[Any] = weakref.WeakSet()


def listen(command_line: bool) -> None:
    """Called in the main process before it starts others.

    command_line: the process is a SGLang command; otherwise it is a Python program.
    """
    global _starting, _command_line, _others, _contexts
    _starting, _command_line = True, command_line
    _others = set(multiprocessing.active_children())
    _contexts = weakref.WeakSet(_open_contexts())
    failure.listen()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGQUIT, _on_quit(signal.getsignal(signal.SIGQUIT)))


def forget() -> None:
    """Called in the main process before it starts an engine without kt options."""
    global _starting
    _starting = False


def _on_quit(original: Any) -> Callable[[int, FrameType | None], None]:
    """Replaces SGLang's handler of the signal that a failed scheduler sends. Other ranks send it,
    too, once the rank that found the error has ended."""

    def handle(number: int, frame: FrameType | None) -> None:
        _end_if_reported()
        if callable(original):
            original(number, frame)

    return handle


def _around_wait(original: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Around the main process's wait for the schedulers, each of which sends a mapping."""
    try:
        schedulers = original(*args, **given)
    except Exception:  # SGLang only reports that a scheduler has ended
        _end_if_reported()
        raise
    if _starting and 0 <= failure.confirmed() < len(schedulers):
        _stop()
        failure.stop(
            "SGLang's schedulers did not load the kt-moe plugin; see their log", _command_line
        )
    if _starting:
        failure.started()
    return schedulers


def _end_if_reported() -> None:
    if _starting and failure.reported():
        _stop()
        failure.repeat(_command_line)


def _stop() -> None:
    """Ends the processes that the start created, and closes its sockets, on which this process
    would wait forever."""
    main = threading.current_thread() is threading.main_thread()
    if main:
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    started = set(multiprocessing.active_children()) - _others
    for process in started:
        process.kill()
    for process in started:
        process.join()
    if main:
        signal.signal(
            signal.SIGQUIT, signal.SIG_DFL
        )  # SGLang installs its handler when it starts again
    for context in _open_contexts():
        if context not in _contexts:
            context.destroy(linger=0)


def _open_contexts() -> list[Any]:
    import zmq  # a dependency of SGLang

    return [
        found
        for found in gc.get_objects()
        if issubclass(type(found), zmq.Context) and not found.closed
    ]


def _around_scheduler(
    original: Callable[..., Any], scheduler: Any, *args: Any, **given: Any
) -> None:
    """Around the construction of a scheduler, which loads the model."""
    try:
        original(scheduler, *args, **given)
        from kt_kernel.serving import cache, recording  # other processes do not need them

        recording.begin()  # the start computes batches that are no requests
        cache.begin()  # nor may experts move while CUDA graphs are captured
    except Exception as error:
        try:
            failure.end(error, CONTRACT.package)
        except SystemExit as end:
            sys.stdout.flush()
            print(end.code, file=sys.stderr, flush=True)
            os._exit(1)  # threads that SGLang has started may not end
        raise


HOOKS = (
    Hook("sglang.srt.entrypoints.engine:_wait_for_scheduler_ready", "AROUND", _around_wait),
    Hook("sglang.srt.managers.scheduler:Scheduler.__init__", "AROUND", _around_scheduler),
)
