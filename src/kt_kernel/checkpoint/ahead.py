"""Reads experts ahead, so that reading, conversion and packing overlap."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Generic, TypeVar

from ..runtime.background import start_thread

#: Bytes that may wait for packing, in addition to one expert being read and one being packed. A
#: larger expert may wait alone. This is more than enough to keep a disk busy.
AHEAD_BYTES = 64 << 20

T = TypeVar("T")
_END: Any = object()


def read_ahead(
    keys: Iterable[int], read: Callable[[int], T], size: Callable[[T], int]
) -> Generator[tuple[int, T], None, None]:
    """Yields `(key, read(key))` for each key in order. A separate thread calls `read`.

    size: returns the bytes of a result; see `AHEAD_BYTES`. An exception from `read` is raised in
    place of its result. Once the iterator is closed, `read` is no longer running.
    """
    return _Reader(read, size).results(iter(keys))


class _Reader(Generic[T]):
    def __init__(self, read: Callable[[int], T], size: Callable[[T], int]) -> None:
        self._read, self._size = read, size
        self._changed = threading.Condition()  # guards the fields below
        # (key, result or exception or _END, bytes)
        self._waiting: deque[tuple[int, Any, int]] = deque()
        self._bytes = 0
        self._stopped = False

    def results(self, keys: Iterator[int]) -> Generator[tuple[int, T], None, None]:
        thread = start_thread("kt-read", lambda: self._run(keys), self._stop)
        try:
            while self._await():
                yield self._pop()  # keep no reference to the result
        finally:
            self._stop()
            thread.join()

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _await(self) -> bool:
        """Waits for the next result; False after the last. Raises what `read` raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            result = self._waiting[0][1]
        if isinstance(result, BaseException):
            raise result
        return result is not _END

    def _pop(self) -> tuple[int, T]:
        with self._changed:
            key, result, size = self._waiting.popleft()
            self._bytes -= size
            self._changed.notify()
        return key, result

    def _run(self, keys: Iterator[int]) -> None:
        try:
            for key in keys:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._stopped or not self._waiting or self._bytes < AHEAD_BYTES
                    )
                    if self._stopped:
                        return
                result = self._read(key)
                self._put(key, result, self._size(result))
                del result
            self._put(-1, _END, 0)
        except BaseException as error:  # passed to the waiting thread
            self._put(-1, error, 0)

    def _put(self, key: int, result: T | BaseException, size: int) -> None:
        with self._changed:
            self._waiting.append((key, result, size))
            self._bytes += size
            self._changed.notify()
