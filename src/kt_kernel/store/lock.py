"""One process at a time writes to a packed directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

LOCK = "kt_manifest.json.lock"
# What file systems without locks answer. There nothing keeps two conversions apart.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@contextlib.contextmanager
def only_writer(folder: str, wait: bool) -> Iterator[None]:
    """Holds the lock of a directory.

    wait: for another process that holds it. Raises BlockingIOError where another one does and
    `wait` is false; OSError naming the lock's file where it cannot be made.
    """
    path = os.path.join(folder, LOCK)
    fd = _acquire(path, folder, wait)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.close(fd)


def _acquire(path: str, folder: str, wait: bool) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return fd
            os.close(fd)
            if isinstance(error, BlockingIOError):
                message = "another process is writing to this packed directory"
                raise BlockingIOError(error.errno, message, folder) from None
            raise type(error)(error.errno, error.strerror, path) from None
        except BaseException:
            os.close(fd)
            raise
        # The one who had it took the file away with it: then this is a lock of nothing.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)
