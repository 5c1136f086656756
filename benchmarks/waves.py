"""Processes that load engines side by side, and are timed one at a time.

An engine takes much longer to start than to be timed. A `Wave` starts one process for each task.
All load at the same time; then, while the others wait, each is timed. Forked from a process that
has imported the engine, they need not import it again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from threading import BrokenBarrierError
from typing import Any

_PATIENCE = 60  # seconds that a process waits for the others


class Wave:
    """Processes that load from now on. Iteration times them in turn: (name, result) of each.

    A result without "error" is what the task yielded, and "start_seconds".

    Args:
        tasks: (name, function, arguments). The function gets them and a `Quiet`; it is a generator,
            which yields once when it has loaded, and once more its result.
        start: "fork", or "spawn" for processes that share nothing with this one.
        limit: seconds in which a process loads, and then is timed; or else its result is an error.
        measured: how many of the tasks use their `Quiet`.
    """

    def __init__(
        self,
        tasks: Sequence[tuple[str, Callable[..., Any], tuple[Any, ...]]],
        start: str,
        limit: float,
        measured: int = 0,
    ) -> None:
        made: Any = multiprocessing.get_context(start)
        quiet = Quiet(made.Barrier(measured) if measured else None, made.Lock())
        self._limit, self._running = limit, []
        for name, function, arguments in tasks:
            ours, theirs = made.Pipe()
            process = made.Process(target=_run, args=(theirs, function, arguments, quiet))
            process.start()
            theirs.close()
            self._running.append((name, process, ours))

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        end = time.monotonic() + self._limit
        try:
            loaded = {name: _answer(pipe, end) for name, _, pipe in self._running}
            for name, _, pipe in self._running:
                found = loaded[name]
                if "error" not in found:
                    with contextlib.suppress(BrokenPipeError):  # it has ended, as the answer says
                        pipe.send("time")
                    found |= _answer(pipe, time.monotonic() + self._limit)
                yield name, found
        finally:  # or else this process would wait for them when it ends
            for _, process, _ in self._running:
                process.kill()  # engines take long to end
            for _, process, _ in self._running:
                process.join()


class Quiet:
    """Of the processes of a wave: what must run alone while all load, such as a measurement."""

    def __init__(self, together: Any, lock: Any) -> None:
        self._together, self._lock = together, lock

    def alone(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, but one process at a time."""

        def locked(*given: Any) -> Any:
            with self._lock:
                return call(*given)

        return locked

    def __call__(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, but it begins once every process has come so far, and one at a time. They
        go on together."""

        def waiting(*given: Any) -> Any:
            self._wait()
            found = self.alone(call)(*given)
            self._wait()
            return found

        return waiting

    def _wait(self) -> None:
        try:
            self._together.wait(_PATIENCE)
        except BrokenBarrierError:  # one of them failed: the rest is measured all the same
            print("waves: a process did not come", flush=True)


def _run(pipe: Any, function: Callable[..., Any], arguments: Any, quiet: Quiet) -> None:
    """Of a child: loads, waits, is timed. It ends with the pipe."""
    try:
        begin = time.monotonic()
        task = function(*arguments, quiet)
        next(task)
        pipe.send({"start_seconds": time.monotonic() - begin})
        pipe.recv()
        pipe.send(next(task))
        pipe.recv()
    except EOFError:
        pass
    except BaseException:
        pipe.send({"error": traceback.format_exc()[-2000:]})
    os._exit(0)


def _answer(pipe: Any, end: float) -> dict[str, Any]:
    try:
        if not pipe.poll(max(0.0, end - time.monotonic())):
            return {"error": "it took too long"}
        return pipe.recv()
    except (EOFError, ConnectionError):
        return {"error": "its process ended"}
