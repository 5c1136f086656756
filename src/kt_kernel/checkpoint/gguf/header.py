"""Reads and checks the header of one GGUF file, without touching its tensor data.

The format, all little-endian:

- "GGUF", uint32 version (2 or 3), uint64 number of tensors, uint64 number of keys
- the keys: for each a string, a uint32 type, and a value
- the tensors: for each a name, the uint32 number of dimensions, the dimensions (uint64, innermost
  first), a uint32 type, and a uint64 offset
- the data, at the next multiple of the alignment (key general.alignment, or 32); offsets are
  relative to it

A string is a uint64 length and UTF-8. An array is a uint32 type, a uint64 length, and the values.
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)

This module does its own checks instead of using a library. Every problem is a ValueError that names
the file and the key or tensor, before any data is read or allocated, and in little time. Only the
keys that are used are kept; all others, such as vocabularies, are skipped. A header with more parts
than any model needs is refused before they are read.
"""

from __future__ import annotations

import math
import os
import re
import struct
from dataclasses import dataclass
from typing import BinaryIO

from ...runtime.files import need_file, reading
from ..header import TensorInfo, explain_other_formats
from .types import NOT_STORED, TYPES, GgmlType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ARCHITECTURE, TYPE, ALIGNMENT = "general.architecture", "general.type", "general.alignment"
#: Number of a part, number of parts, and number of tensors in all parts.
SPLIT = ("split.no", "split.count", "split.tensors.count")
#: E, H and I. The full key is the architecture's name, a dot, and one of these.
SIZES = ("expert_count", "embedding_length", "expert_feed_forward_length")
_USED = {ARCHITECTURE, TYPE, ALIGNMENT, *SPLIT}
_USED_SIZES = re.compile(rf"[^.]{{1,64}}\.({'|'.join(SIZES)})")

# Limits for time and memory.
MAX_HEADER_BYTES = 1 << 27  # the largest vocabularies make headers of about 20 MB
MAX_KEYS = 1 << 14  # models have about a hundred
MAX_TENSORS = 1 << 17  # per file; Kimi-K2 would have 70,000 if its experts were not stacked
MAX_STRINGS = 1 << 21  # in all arrays; the largest vocabularies have 300,000, and as many merges
MAX_ARRAYS = 1 << 14  # in all arrays; no model has any
MAX_DEPTH = 4  # of arrays in arrays
MAX_KEY_BYTES = 65535  # the specification's limit
MAX_NAME_BYTES = 256  # of a tensor's name; the specification allows 64
MAX_KEPT_BYTES = 4096  # of a string; longer values are not used
MAX_RANK = 4
DEFAULT_ALIGNMENT = 32

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_CODES = {number: struct.Struct("<" + code) for number, code in _SCALARS.items()}
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_TENSOR = {n: struct.Struct(f"<{n}QIQ") for n in range(1, MAX_RANK + 1)}  # after the rank
_WINDOW = 1 << 16  # bytes read at a time
# First bytes of llama.cpp's formats before GGUF.
_OLDER = (b"lmgg", b"fmgg", b"tjgg", b"algg")

Value = int | float | bool | str


@dataclass(frozen=True)
class GgufHeader:
    """tensors: by name, in the order of the header; begin and end are offsets in the file.
    metadata: those of the used keys whose values are numbers, bools or short strings."""

    path: str
    tensors: dict[str, TensorInfo]
    metadata: dict[str, Value]

    @property
    def architecture(self) -> str | None:
        """The architecture according to the file, such as "qwen3moe"."""
        name = self.metadata.get(ARCHITECTURE)
        return name if isinstance(name, str) else None


def read_gguf_header(path: str) -> GgufHeader:
    """Reads the header of the GGUF file at `path`.

    Raises ValueError naming the file and, if applicable, the key or tensor. Raises OSError (with
    the path) if the file cannot be read.
    """
    need_file(path, "a GGUF file")
    with reading(path) as file:
        cursor = _Cursor(path, file)
        _check_start(path, cursor)
        tensors = cursor.u64("number of tensors")
        cursor.check_count(tensors, 33, "tensors", MAX_TENSORS)
        keys = cursor.u64("number of keys")
        cursor.check_count(keys, 14, "keys", MAX_KEYS)
        metadata, alignment = _read_metadata(cursor, keys)
        entries = [_read_tensor(cursor) for _ in range(tensors)]
    start = -(-cursor.position // alignment) * alignment
    return GgufHeader(path, _place(path, entries, start, alignment, cursor.size), metadata)


class _Cursor:
    """Reads forward through a header. Raises ValueError instead of reading past its end."""

    def __init__(self, path: str, file: BinaryIO) -> None:
        self.path, self._file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.position = 0
        self.what = "header"
        self._limit = min(self.size, MAX_HEADER_BYTES)
        self._window, self._start = b"", 0
        self._strings, self._arrays = MAX_STRINGS, MAX_ARRAYS  # how many more arrays may contain

    def need(self, count: int) -> None:
        """Raises ValueError unless at least `count` bytes follow."""
        if count > self._limit - self.position:
            if self._limit == self.size:
                problem = f"the file has only {self.size} (file truncated, or length is wrong)"
            else:
                problem = f"the limit of a header is {self._limit}"
            raise ValueError(
                f"{self.path}: {self.what}: {count} bytes from byte {self.position}, but {problem}"
            )

    def check_count(self, count: int, least: int, things: str, most: int) -> None:
        """Raises ValueError if `count` is above `most`, or if `count` things of at least `least`
        bytes each cannot follow."""
        if count > (self._limit - self.position) // least:
            raise ValueError(
                f"{self.path}: {self.what}: {count} {things} do not fit into the"
                f" {self._limit - self.position} bytes that can follow (file truncated, or count is"
                " wrong)"
            )
        if count > most:
            raise ValueError(f"{self.path}: {self.what}: {count} {things}; accepted: up to {most}")

    def take(self, count: int) -> bytes:
        self.need(count)
        begin = self.position - self._start
        if not 0 <= begin <= len(self._window) - count:
            self._file.seek(self.position)
            self._window, self._start = self._file.read(max(count, _WINDOW)), self.position
            begin = 0
            if len(self._window) < count:
                raise ValueError(f"{self.path}: {self.what}: the file ends (truncated file)")
        self.position += count
        return self._window[begin : begin + count]

    def skip(self, count: int) -> None:
        self.need(count)
        self.position += count

    def skip_strings(self, count: int) -> None:
        """Skips strings. The loop is inlined because a vocabulary has hundreds of thousands."""
        self.check_count(count, 8, "strings in arrays", self._strings)
        self._strings -= count
        position, limit, unpack = self.position, self._limit, _U64.unpack_from
        window, start = self._window, self._start
        for _ in range(count):
            begin = position - start
            if begin > len(window) - 8:
                self.position = position
                self.take(8)
                window, start, begin = self._window, self._start, 0
            position += 8 + unpack(window, begin)[0]
            if position > limit:
                self.position = limit
                self.need(position - limit)
        self.position = position

    def begin_arrays(self, count: int) -> None:
        """Raises ValueError unless this many arrays can follow in an array."""
        self.check_count(count, 12, "arrays in arrays", self._arrays)
        self._arrays -= count

    def u32(self) -> int:
        return _U32.unpack(self.take(4))[0]

    def u64(self, what: str | None = None) -> int:
        self.what = what or self.what
        return _U64.unpack(self.take(8))[0]

    def name(self, kind: str, most: int) -> str:
        """Reads a key or a tensor's name of at most this many bytes."""
        before, self.what = self.what, f"name of a {kind}"
        length = self.u64()
        if not 0 < length <= most:
            raise ValueError(
                f"{self.path}: {self.what} after {before}: {length} bytes; accepted: 1 to {most}"
            )
        text = self.take(length)
        try:
            name = text.decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{self.path}: {self.what}: {text!r} is not UTF-8") from None
        self.what = f"{kind} {name!r}"
        return name


def _check_start(path: str, cursor: _Cursor) -> None:
    start = cursor.take(8) if cursor.size >= 8 else b""
    if not start.startswith(MAGIC):
        explain_other_formats(path, start)
        if start[:4] in _OLDER:
            raise ValueError(
                f"{path}: a file of llama.cpp from before GGUF; convert the model again"
            )
        raise ValueError(f"{path}: begins with {start[:4]!r}; expected a GGUF file (b'GGUF')")
    version = _U32.unpack(start[4:])[0]
    swapped = int.from_bytes(start[4:], "big")
    accepted = " and ".join(map(str, VERSIONS))
    if version in VERSIONS:
        return
    if swapped in (1, *VERSIONS):
        raise ValueError(f"{path}: a big-endian GGUF file; accepted: little-endian ones")
    raise ValueError(f"{path}: GGUF version {version}; accepted: {accepted}")


def _read_metadata(cursor: _Cursor, count: int) -> tuple[dict[str, Value], int]:
    """Returns the used keys and the alignment."""
    metadata: dict[str, Value] = {}
    seen: set[str] = set()
    alignment = DEFAULT_ALIGNMENT
    for _ in range(count):
        key = cursor.name("key", MAX_KEY_BYTES)
        kind = cursor.u32()
        if key not in _USED and not _USED_SIZES.fullmatch(key):
            _skip_value(cursor, kind)
            continue
        if key in seen:
            raise ValueError(f"{cursor.path}: key {key!r} occurs twice")
        seen.add(key)
        value = _read_value(cursor, kind)
        if key == ALIGNMENT:
            if kind != _UINT32 or not isinstance(value, int) or value.bit_count() != 1:
                raise ValueError(
                    f"{cursor.path}: key {key!r} is {value!r}; accepted: a power of two as uint32"
                )
            alignment = value
        if value is not None:
            metadata[key] = value
    return metadata, alignment


def _read_value(cursor: _Cursor, kind: int) -> Value | None:
    """Reads a value. Returns None for an array or a long string."""
    if kind in _CODES:
        return _CODES[kind].unpack(cursor.take(_CODES[kind].size))[0]
    if kind != _STRING:
        _skip_value(cursor, kind)
        return None
    length = cursor.u64()
    if length > MAX_KEPT_BYTES:
        cursor.skip(length)
        return None
    return cursor.take(length).decode("utf-8", "replace")


def _skip_value(cursor: _Cursor, kind: int) -> None:
    if kind in _CODES:
        cursor.skip(_CODES[kind].size)
    elif kind == _STRING:
        cursor.skip(cursor.u64())
    elif kind == _ARRAY:
        _skip_array(cursor, MAX_DEPTH)
    else:
        raise _unknown_type(cursor, kind)


def _skip_array(cursor: _Cursor, depth: int) -> None:
    kind, count = cursor.u32(), cursor.u64()
    if kind in _CODES:
        cursor.skip(count * _CODES[kind].size)
    elif kind == _STRING:
        cursor.skip_strings(count)
    elif kind == _ARRAY:
        if depth == 1:
            raise ValueError(
                f"{cursor.path}: {cursor.what}: arrays in arrays; accepted: up to {MAX_DEPTH} deep"
            )
        cursor.begin_arrays(count)
        for _ in range(count):
            _skip_array(cursor, depth - 1)
    else:
        raise _unknown_type(cursor, kind)


def _unknown_type(cursor: _Cursor, kind: int) -> ValueError:
    return ValueError(
        f"{cursor.path}: {cursor.what} has a value of type {kind}; accepted: 0 to {max(_CODES)}"
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as described by the header. begin is relative to the data."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    begin: int
    size: int


def _read_tensor(cursor: _Cursor) -> _Entry:
    name = cursor.name("tensor", MAX_NAME_BYTES)
    where = f"{cursor.path}: tensor {name!r}"
    rank = cursor.u32()
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"{where} has {rank} dimensions; accepted: 1 to {MAX_RANK}")
    *dims, number, begin = _TENSOR[rank].unpack(cursor.take(_TENSOR[rank].size))
    shape = tuple(dims[::-1])
    # Other types may be newer, or of a fork. Only whoever needs such a tensor refuses it.
    kind = TYPES.get(number) or GgmlType(NOT_STORED.get(number, f"number {number}"), 1, 0)
    # Checked for tensors without values, too: the number of their rows must not overflow.
    if math.prod(max(size, 1) for size in shape) * kind.size >= 2**63:
        raise ValueError(f"{where} has shape {list(shape)}; expected less than 2^63 bytes")
    if shape[-1] % kind.columns:
        raise ValueError(
            f"{where} has rows of {shape[-1]} columns; {kind.name} has them in blocks of"
            f" {kind.columns}"
        )
    return _Entry(name, kind, shape, begin, math.prod(shape) // kind.columns * kind.size)


def _place(
    path: str, entries: list[_Entry], start: int, alignment: int, size: int
) -> dict[str, TensorInfo]:
    """Returns the tensors by name, with their offsets in the file. Checks that they lie within the
    file and do not overlap."""
    tensors: dict[str, TensorInfo] = {}
    for entry in entries:
        begin = start + entry.begin
        info = TensorInfo(entry.name, path, entry.kind.name, entry.shape, begin, begin + entry.size)
        if info.name in tensors:
            raise ValueError(f"{info} occurs twice")
        if entry.begin % alignment:
            raise ValueError(
                f"{info} begins at byte {entry.begin} of the data; expected a multiple of the"
                f" alignment, {alignment}"
            )
        if info.end > size:
            raise ValueError(
                f"{info} ends at byte {info.end}, but the file has only {size} (truncated file)"
            )
        tensors[info.name] = info
    before: TensorInfo | None = None
    for info in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if before is not None and info.begin < before.end:
            raise ValueError(f"{info} overlaps tensor {before.name!r}")
        before = info
    return tensors
