"""Locks between processes, based on files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time

_POLL_SECONDS = 0.05
# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)

_held: dict[int, FileLock] = {}  # by descriptor


class FileLock:
    """An exclusive lock on a file that exists only while the lock is held.

    Two objects in one process exclude each other, too. When a process ends, its locks are released.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self, seconds: float | None) -> bool:
        """Takes the lock. Returns False if this takes longer than ``seconds``; None waits without
        limit. If the file system has no locks, every caller gets one.

        Raises OSError naming the file if it cannot be created or locked.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(self.path, flags, 0o666)
            try:
                locked = self._lock(fd, end)
            except BaseException:
                os.close(fd)
                raise
            if not locked:
                os.close(fd)
                return False
            # The last holder may have removed the file after it was opened here. The lock would
            # then be on a file that nobody else can open.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(fd), os.stat(self.path)):
                    self._fd = fd
                    _held[fd] = self
                    return True
            os.close(fd)

    def _lock(self, fd: int, end: float | None) -> bool:
        wait = fcntl.LOCK_EX if end is None else fcntl.LOCK_EX | fcntl.LOCK_NB
        while True:
            try:
                fcntl.flock(fd, wait)
                return True
            except BlockingIOError:
                if end is None or time.monotonic() >= end:
                    return False
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return True
                raise type(error)(error.errno, error.strerror, self.path) from None
            time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Releases the lock. Does nothing if this process does not hold it: a child forked
        meanwhile has the object, but not the lock."""
        fd, self._fd = self._fd, None
        if fd is None or _held.get(fd) is not self:
            return
        del _held[fd]
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough while a forked child has it open
        os.close(fd)


def _close_after_fork() -> None:
    """The lock belongs to the parent; a child that outlives it must not keep it."""
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_close_after_fork)
