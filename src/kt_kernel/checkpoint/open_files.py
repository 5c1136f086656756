"""The files of a checkpoint, held open during one call."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Self

from .index import Index, stamp


class OpenFiles:
    """Opens files, and checks before each read that they have not changed.

    Accessing a mapped file that has become shorter kills the process. Each read therefore requests
    its file again, which checks it. A file can still be truncated after the check. Descriptors stay
    open because another file may take over the name.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._stack = ExitStack()
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def descriptor(self, path: str) -> int:
        """The descriptor of one of the index's files. Raises ValueError if the file has changed."""
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, self._descriptors[path])
        self.check(path, self._descriptors[path])
        return self._descriptors[path]

    def check(self, path: str, descriptor: int | None = None) -> None:
        """Raises ValueError if a file, found by `descriptor` or else by name, has changed."""
        if stamp(path if descriptor is None else descriptor) != self._index.stamps[path]:
            raise ValueError(f"{path}: changed since the checkpoint was opened")
