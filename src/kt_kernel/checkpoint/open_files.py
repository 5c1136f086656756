"""A checkpoint's files, held open during one call."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Self

from .index import Index, stamp


class OpenFiles:
    """A mapped file that has become shorter kills the process on access, so each read asks for its
    file anew, which looks whether it is as it was; what is in memory by then may still be cut off
    afterwards. Descriptors are held, since another file may come to have the name.
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
        """Of one of the index's files. ValueError if it was changed."""
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._stack.callback(os.close, self._descriptors[path])
        self.check(path, self._descriptors[path])
        return self._descriptors[path]

    def check(self, path: str, descriptor: int | None = None) -> None:
        """ValueError if a file, open as `descriptor` or by its name, was changed."""
        if stamp(path if descriptor is None else descriptor) != self._index.stamps[path]:
            raise ValueError(f"{path}: changed since the checkpoint was opened")
