"""Files with a checksum that exist completely or not at all, even after a power failure."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...runtime.files import PARTIAL, Replacement, named


class AtomicFile(Replacement):
    """A durable `Replacement` with its size and checksum. It is written as `path`.partial, so only
    one writer at a time may use a path."""

    def __init__(self, path: str) -> None:
        super().__init__(path, durable=True, partial=path + PARTIAL)
        self._hash = hashlib.sha256()
        self._hasher = ThreadPoolExecutor(1, "kt-hash")  # runs while the file is written
        self.bytes = 0

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self.bytes += len(view)
        hashed = self._hasher.submit(self._hash.update, view)
        try:
            super().write(view)
        finally:
            hashed.result()  # the caller may use the memory again

    @property
    def sha256(self) -> str:
        """SHA-256 of the data written so far."""
        return self._hash.hexdigest()

    def __exit__(self, *error: object) -> None:
        self._hasher.shutdown()
        super().__exit__(*error)


class _Stopped(Exception):
    """Ends the reading or writing of a file that nobody waits for any more."""


@contextlib.contextmanager
def until_left(
    progress: Callable[[int], None], finish_on_error: bool = False
) -> Iterator[Callable[[int], None]]:
    """A `progress` for other threads. If the block is left by an error or an interrupt, its next
    call raises, so that nothing waits for the end of a large file.

    finish_on_error: only an interrupt has this effect; after an error, the other thread may finish.
    """
    left = threading.Event()

    def call(count: int) -> None:
        if left.is_set():
            raise _Stopped
        progress(count)

    try:
        yield call
    except BaseException as error:
        if not (finish_on_error and isinstance(error, Exception)):
            left.set()
        raise


def sha256_of(path: str, progress: Callable[[int], None] = lambda count: None) -> str:
    """Checksum of a file. progress: called with the bytes of each piece read."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    with open(path, "rb", buffering=0) as file, named(path):
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            progress(count)
    return digest.hexdigest()
