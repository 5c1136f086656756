"""Runs functions in a process of their own, whose memory is free again when it has ended.

What `kt tune` measures with takes up to a quarter of the free memory and some GB of the GPU, and a
CUDA context stays until its process ends. The servers that are started afterwards must find this
memory free, as they will without `kt tune`.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Result = TypeVar("Result")


class Apart:
    """A process that calls functions; use it in a with statement. Functions, arguments and results
    travel by pickle."""

    def __enter__(self) -> Apart:
        context = multiprocessing.get_context("spawn")  # a fork would share this process's memory
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        # An interrupt of the terminal reaches both processes. It ends this one, which then ends the
        # other one; that one ignores it from its first moment on.
        catches = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if catches else None
        try:
            self._process.start()
        finally:
            if catches:
                signal.signal(signal.SIGINT, before)
        other.close()
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()
        if error[0] is not None:  # such as an interrupt, while a function is running
            self._process.kill()
        self._process.join()
        self._process.close()

    def __call__(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """The result of the function in the other process.

        Raises:
            ChildProcessError: the other process ended, as by a lack of memory.
            Exception: whatever the function raises; RuntimeError in place of what pickle refuses.
        """
        try:
            self._connection.send((function, arguments))
            succeeded, result = self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode
            raise ChildProcessError(
                f"the process that measures ended with code {code} in {function.__name__}"
                + (": it may have been killed for memory" if code == -signal.SIGKILL else "")
            ) from None
        if not succeeded:
            raise result
        found: Result = result
        return found


def _serve(connection: Connection) -> None:
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            result = True, function(*arguments)
        except Exception as error:
            result = False, _picklable(error)
        try:
            connection.send(result)
        except OSError:  # the other process is gone
            return
        except Exception as error:  # pickle refuses it
            connection.send((False, _picklable(error)))


def _picklable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
