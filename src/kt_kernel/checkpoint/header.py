"""Reads and checks the header of one safetensors file, without touching its tensor data.

The format is an unsigned 64-bit little-endian length, that many bytes of JSON, then the data. The
JSON maps each tensor name to {"dtype", "shape", "data_offsets": [begin, end]}. Offsets are relative
to the data, which the tensors must fill without holes or overlaps.
(https://huggingface.co/docs/safetensors/index#format)

This module does its own checks instead of using the library's. Every problem is a ValueError that
names the file and the tensor, before any data is read. The library refuses a whole file for one
tensor of a type that it does not know.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from ..runtime.files import need_file, parse_object, reading

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

_BITS = {
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    16: "U16 I16 F16 BF16",
    32: "U32 I32 F32",
    64: "U64 I64 F64 C64",
}
DTYPE_BITS = {name: bits for bits, names in _BITS.items() for name in names.split()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is stored. `file` is a path. begin and end are byte offsets in the file."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.file}: tensor {self.name!r}"


def read_header(path: str) -> dict[str, TensorInfo]:
    """Returns the tensors of the safetensors file at `path`, in the order of the header.

    Raises ValueError naming the file and, if applicable, the tensor. Raises OSError (with the path)
    if the file cannot be read.
    """
    need_file(path, "a safetensors file")
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        if len(start) < 8:
            raise ValueError(
                f"{path}: {size} bytes; a safetensors file starts with an 8-byte header length"
                " (truncated file?)"
            )
        length = int.from_bytes(start, "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            explain_other_formats(path, start)
            raise ValueError(
                f"{path}: header length {length}, but the file has {size} bytes and the limit is"
                f" {MAX_HEADER_BYTES} (truncated, or not a safetensors file)"
            )
        text = file.read(length)
    if len(text) < length:
        raise ValueError(f"{path}: header ends after {len(text)} of {length} bytes")
    entries = parse_object(text, f"{path}: header is ", unique=True)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError(f"{path}: __metadata__ is not a map of strings")
    start_of_data = 8 + length
    tensors = {name: _tensor(path, name, entry, start_of_data) for name, entry in entries.items()}
    _check_data(path, tensors, start_of_data, size)
    return tensors


def explain_other_formats(path: str, start: bytes) -> None:
    """Raises ValueError if a file begins like one of another format."""
    if start.startswith(b"GGUF"):
        raise ValueError(f"{path}: this is a GGUF file, but its name says safetensors")
    if start.startswith(b"version "):
        raise ValueError(f"{path}: a Git LFS pointer, not the file itself; run `git lfs pull`")
    if start.startswith(b"PK\x03\x04"):
        raise ValueError(f"{path}: PyTorch pickle files are not read; convert it to safetensors")


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _tensor(path: str, name: str, entry: Any, start: int) -> TensorInfo:
    """start: where the data begin in the file."""
    where = f"{path}: tensor {name!r}"
    if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
        raise ValueError(f"{where}: half of a surrogate pair; expected Unicode")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where}: expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"{where}: dtype {dtype!r} is not a string")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise ValueError(f"{where}: shape {shape!r} is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise ValueError(f"{where}: data_offsets {offsets!r} are not two byte offsets")
    begin, end = offsets
    # A type that is not listed may be newer. Only whoever needs the tensor refuses it.
    bits = math.prod(shape) * DTYPE_BITS[dtype] if dtype in DTYPE_BITS else (end - begin) * 8
    if (end - begin) * 8 != bits:
        raise ValueError(
            f"{where}: {dtype} {shape} takes {bits / 8:g} bytes, but data_offsets {offsets} span"
            f" {end - begin}"
        )
    return TensorInfo(name, path, dtype, tuple(shape), start + begin, start + end)


def _check_data(path: str, tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    """start, size: where the data begin and end in the file."""
    position = start
    for info in sorted(tensors.values(), key=lambda t: (t.begin, t.end)):
        if info.begin != position:
            problem = "overlaps the tensor before it" if info.begin < position else "leaves a hole"
            raise ValueError(
                f"{info} {problem}: it begins at byte {info.begin - start} of the data, not"
                f" {position - start}"
            )
        if info.end > size:
            raise ValueError(
                f"{info} ends at byte {info.end - start} of the data, but the file has only"
                f" {size - start}"
                " (truncated file)"
            )
        position = info.end
    if position != size:
        raise ValueError(
            f"{path}: {size - start} bytes of data, but the header describes {position - start}"
        )
