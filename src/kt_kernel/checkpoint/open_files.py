"""The files of a checkpoint, open during one call and read by offset.

Files are read, not mapped. A page of a mapped file that cannot be read kills the process: a disk or
a network file system fails, or the file has become shorter. A failed read is a Python exception.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import torch

from ..runtime.files import named
from .header import TensorInfo
from .index import Index, stamp

#: Files open at a time. A layer may be spread over more files than a process may open.
MAX_OPEN = 32

_HUGE = 2 << 20  # bytes of a huge page, without which the kernel spends most of a read on faults
_MADVISE = ctypes.CDLL(None).madvise
_MADVISE.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


# A tensor of which an expert has the n-th of m equal parts: (tensor, n, m).
Piece = tuple[TensorInfo, int, int]


class OpenFiles:
    """Opens files, and checks before each read that they have not changed."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._descriptors: dict[str, int] = {}  # by path, the latest opened last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read_part(self, info: TensorInfo, part: int = 0, parts: int = 1) -> torch.Tensor:
        """The bytes of the `part`-th of `parts` equal parts of a tensor, uint8, in memory of its
        own.

        Raises ValueError if the file has changed since the checkpoint was opened, and OSError
        naming it if it cannot be read.
        """
        begin, size = _range(info, part, parts)
        file = self._descriptor(info.file)
        data = _memory(size)
        rest = data.numpy().data
        with named(info.file):
            while rest:
                count = os.preadv(file, [rest], begin)
                if not count:
                    raise _changed(info.file)
                begin, rest = begin + count, rest[count:]
        return data

    def expect(self, info: TensorInfo, part: int = 0, parts: int = 1) -> None:
        """Makes the system start reading what `read_part` will be called for."""
        begin, size = _range(info, part, parts)
        file = self._descriptor(info.file)
        with suppress(OSError):  # only advice
            os.posix_fadvise(file, begin, size, os.POSIX_FADV_WILLNEED)

    def check(self, path: str) -> None:
        """Raises ValueError if one of the index's files has changed."""
        self._descriptor(path)

    def _descriptor(self, path: str) -> int:
        """The descriptor of one of the index's files. Raises ValueError if the file has changed."""
        if path not in self._descriptors:
            if len(self._descriptors) >= MAX_OPEN:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if stamp(self._descriptors[path]) != self._index.stamps[path]:
            raise _changed(path)
        return self._descriptors[path]


@dataclass(frozen=True)
class Pieces:
    """Where files have each expert of a layer. of: the pieces of an expert."""

    files: OpenFiles
    of: Callable[[int], Iterable[Piece]]

    def expect(self, expert: int) -> None:
        """`OpenFiles.expect` for an expert."""
        for piece in self.of(expert):
            self.files.expect(*piece)

    def bytes_of(self, expert: int) -> int:
        """Bytes of an expert in the files."""
        return sum(_range(*piece)[1] for piece in self.of(expert))


def _range(info: TensorInfo, part: int, parts: int) -> tuple[int, int]:
    """Offset and number of the bytes of a part."""
    size = (info.end - info.begin) // parts
    return info.begin + part * size, size


def _changed(path: str) -> ValueError:
    return ValueError(f"{path}: changed since the checkpoint was opened")


def _memory(size: int) -> torch.Tensor:
    data = torch.empty(size, dtype=torch.uint8, device="cpu")
    if size >= 2 * _HUGE:
        begin = -(-data.data_ptr() // _HUGE) * _HUGE
        # Only advice: if it fails, only time is lost.
        _MADVISE(begin, data.data_ptr() + size - begin, mmap.MADV_HUGEPAGE)
    return data
