"""One process at a time writes to a packed directory."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from ...runtime.file_lock import FileLock

LOCK = "kt_manifest.json.lock"


@contextlib.contextmanager
def only_writer(folder: str, wait: bool) -> Iterator[None]:
    """Holds the lock of a directory. A file system without locks keeps no two writers apart.

    wait: for another process that holds it. Raises BlockingIOError where another one does and
    `wait` is false; OSError naming the lock's file where it cannot be made.
    """
    lock = FileLock(os.path.join(folder, LOCK))
    if not lock.acquire(None if wait else 0):
        message = "another process is writing to this packed directory"
        raise BlockingIOError(errno.EWOULDBLOCK, message, folder)
    try:
        yield
    finally:
        lock.release()
