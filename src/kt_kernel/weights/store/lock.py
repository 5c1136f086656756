"""Ensures that only one process at a time writes to a packed directory."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from ...runtime.file_lock import FileLock

LOCK = "kt_manifest.json.lock"


@contextlib.contextmanager
def only_writer(folder: str, wait: bool) -> Iterator[None]:
    """Holds the lock of a directory. On a file system without locks, it does not exclude other
    writers.

    wait: whether to wait for another process that holds the lock. Raises BlockingIOError if another
    process holds it and `wait` is false, and OSError naming the lock file if it cannot be created.
    """
    lock = FileLock(os.path.join(folder, LOCK))
    if not lock.acquire(None if wait else 0):
        message = "another process is writing to this packed directory"
        raise BlockingIOError(errno.EWOULDBLOCK, message, folder)
    try:
        yield
    finally:
        lock.release()
