"""Writes records to a file for Chrome's and Perfetto's viewers.

The format is Chrome's JSON array, an event a line. Engines' workers are killed rather than ended,
so every call of `TraceWriter.write` leaves a file that can be opened: the array's end may be
missing.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..runtime.files import need_writable
from ..runtime.forks import per_process
from .clock import Offset
from .pieces import (
    BUS,
    CPU,
    LANE_OF,
    LANES,
    STREAMED_LANE_OF,
    Piece,
    pieces_of,
    streamed_pieces,
)
from .records import Record, StreamedRecord

TRACE_VARIABLE = "KT_TRACE"

_logger = logging.getLogger("kt_kernel.trace")
_numbers = itertools.count(1)  # numbers of writers: a device is shown as a process with that number
_writers: Counter[str] = Counter()  # that this process has, by file: several devices share one
_parents: set[str] = set()  # files that the parent of this forked process writes
_THREADS = {lane: number for number, lane in enumerate((*LANES, BUS), 1)}
_THREAD_OF = {name: _THREADS[lane] for name, lane in (LANE_OF | STREAMED_LANE_OF).items()}


class TraceWriter:
    """One device's part of a trace. For one thread at a time; never raises for a file that cannot
    be written: it warns once, naming KT_TRACE, the path and the reason, and stops writing."""

    _file: io.FileIO | None

    def __init__(self, path: str | os.PathLike[str], device: str) -> None:
        """Begins the file anew, unless a writer of this process has it open; device: its name."""
        self._path, self._process = os.path.abspath(path), next(_numbers)
        self._offset = Offset()
        self._before: Record | None = None
        self._layers: dict[int, str] = {}  # names in JSON, by slot
        per_process(self, "_file", lambda: None)
        if self._path in _parents:
            self._warn("the process that forked this one writes it")
            return
        first = not _writers[self._path]
        try:
            self._file = _open(self._path, first)
        except (OSError, ValueError) as error:  # ValueError: an invalid path
            self._warn(error)
            return
        _writers[self._path] += 1
        self._put(("[\n" if first else ",\n") + ",\n".join(self._names(device)))

    def write(self, records: Sequence[Record], where: Callable[[int], str]) -> None:
        """Appends a device's records, in the order of their numbers. where: a slot's layer, asked
        for once.

        The GPU's times are shown in the CPU's clock by an `Offset` of these records; until there is
        one they are left out. Lengths are those of the clock that they were taken with.
        """
        if self._file is None or not records:
            return
        self._offset.update(records)
        lines = []
        for record in records:
            name = self._layers.get(record.slot)
            if name is None:
                name = self._layers[record.slot] = json.dumps(where(record.slot))
            about = (
                f'{{"layer":{name},"position":{record.position},"chain":{record.chain},'
                f'"entry":{record.number},"tokens":{record.tokens}}}'
            )
            for piece in pieces_of(record, self._before):
                offset = 0 if LANE_OF[piece.name] == CPU else self._offset.value
                if offset is not None:
                    lines.append(self._event(piece, offset, about))
            self._before = record
        if lines:
            self._put(",\n" + ",\n".join(lines))

    def write_streamed(self, records: Sequence[StreamedRecord]) -> None:
        """Appends streamed layers."""
        if self._file is None or not records:
            return
        lines = []
        for record in records:
            about = (
                f'{{"layer":{json.dumps(record.layer)},"position":{record.position},'
                f'"chain":{record.chain},"entry":{record.number},"tokens":{record.tokens},'
                f'"on_cpu":{record.on_cpu}'
            )
            for piece, experts, nbytes in streamed_pieces(record):
                whole = f'{about},"experts":{experts},"bytes":{nbytes}}}'
                lines.append(self._event(piece, 0, whole))
        self._put(",\n" + ",\n".join(lines))

    def close(self) -> None:
        """Ends the file, unless another device still writes to it. May be called again."""
        if self._file is None:
            return
        if _writers[self._path] == 1:
            self._put("\n]\n")
        self._leave()

    def _event(self, piece: Piece, offset: int, about: str) -> str:
        # By hand: in json.dumps seven of these a layer and token would keep Python's lock too long.
        return (
            f'{{"name":"{piece.name}","ph":"X","pid":{self._process},'
            f'"tid":{_THREAD_OF[piece.name]},"ts":{(piece.start + offset) / 1000:.3f},'
            f'"dur":{(piece.end - piece.start) / 1000:.3f},"args":{about}}}'
        )

    def _names(self, device: str) -> list[str]:
        about: list[dict[str, Any]] = [{"name": "process_name", "args": {"name": device}}]
        for lane, thread in _THREADS.items():
            about.append({"name": "thread_name", "tid": thread, "args": {"name": lane}})
            order = {"sort_index": thread}
            about.append({"name": "thread_sort_index", "tid": thread, "args": order})
        return [json.dumps({"ph": "M", "pid": self._process, **each}) for each in about]

    def _put(self, text: str) -> None:
        assert self._file is not None
        rest = memoryview(text.encode())
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._warn(error)
            self._leave()

    def _leave(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
            _writers[self._path] -= 1

    def _warn(self, error: Exception | str) -> None:
        reason = getattr(error, "strerror", None) or error
        _logger.warning(
            "kt: %s %s: nothing more is written: %s", TRACE_VARIABLE, self._path, reason
        )


def _open(path: str, anew: bool) -> io.FileIO:
    """The file, to append to: devices may share it. Unbuffered, so that a fork has nothing to write
    twice. Raises OSError for anything but a file: opening a pipe would wait for a reader, and a
    file that this process has open under another name would lose what is in it."""
    need_writable(path, again=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    fd = os.open(path, flags | (os.O_TRUNC if anew else 0), 0o666)
    return io.FileIO(fd, "a")


def _leave_to_parent() -> None:
    _parents.update(path for path, count in _writers.items() if count)
    _writers.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
