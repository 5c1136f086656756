"""Writes GGUF files byte by byte, so that every field can be wrong."""

from __future__ import annotations

import struct

U32, U64, STRING, ARRAY = 4, 10, 8, 9


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def number(name: str, value: int) -> bytes:
    return key(name, U32, struct.pack("<I", value))


def array(kind: int, count: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + values


def tensor(
    name: str | bytes,
    dims: tuple[int, ...] = (32,),
    kind: int = 0,
    offset: int = 0,
    rank: int | None = None,
) -> bytes:
    """dims are in the order of the file, innermost first."""
    return (
        text(name)
        + struct.pack("<I", len(dims) if rank is None else rank)
        + b"".join(struct.pack("<Q", d) for d in dims)
        + struct.pack("<IQ", kind, offset)
    )


def gguf(
    keys: list[bytes] | tuple[bytes, ...] = (),
    tensors: list[bytes] | tuple[bytes, ...] = (),
    data: int = 0,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    tensor_count: int | None = None,
    key_count: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file with this many bytes of data."""
    head = magic + struct.pack("<I", version)
    head += struct.pack("<Q", len(tensors) if tensor_count is None else tensor_count)
    head += struct.pack("<Q", len(keys) if key_count is None else key_count)
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + bytes(data)
