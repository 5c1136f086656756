"""Finds the GGUF files of a model: one file, or all parts of a split model.

A path is a GGUF file, any part of a split model, or a folder. Folders are searched recursively,
except hidden ones. A part is named `{name}-{i:05d}-of-{n:05d}.gguf`. Its keys split.no (from 0),
split.count and split.tensors.count must agree with that. The first part has the model's keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ...runtime.files import reading
from ..index import Index, folders, stamp
from .header import MAGIC, SPLIT, TYPE, GgufHeader, read_gguf_header

SUFFIX = ".gguf"
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)
# GGUF files that accompany a model: projectors, adapters, statistics.
_SIDECAR_TYPES = ("adapter", "imatrix", "mmproj")
_SIDECAR_ARCHITECTURES = ("clip", "mmproj")


@dataclass
class GgufIndex(Index):
    """header: that of the only file, or of the first part, which describes the model."""

    header: GgufHeader = field(kw_only=True)


def is_gguf(path: str) -> bool:
    """Whether to read a file or folder as GGUF. Raises OSError, and ValueError for a folder with
    models in both formats."""
    if not os.path.isdir(path):
        if path.endswith(SUFFIX):
            return True
        if not os.path.isfile(path):
            return False
        with reading(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    files = [name for _, _, names in folders(path) for name in names]
    gguf = [name for name in files if name.endswith(SUFFIX)]
    other = [name for name in files if name.endswith(".safetensors")]
    if gguf and other:
        raise ValueError(
            f"{path}: holds both GGUF files ({gguf[0]}) and safetensors files ({other[0]}); name"
            " the file, or a folder with one of them"
        )
    return bool(gguf)


def read_gguf_index(path: str) -> GgufIndex:
    """Reads the headers of all files of the model at `path`, but no tensor data.

    Raises FileNotFoundError, PermissionError, or ValueError naming the file for a fault in a
    header, a missing part, a part of another model, a tensor in two parts, or several models in a
    folder.
    """
    path = os.path.abspath(path)
    stamps = {path: stamp(path)}
    headers: dict[str, GgufHeader] = {}

    def header(file: str) -> GgufHeader:
        if file not in headers:
            stamps[file] = stamp(file)
            headers[file] = read_gguf_header(file)
        return headers[file]

    first = path
    if os.path.isdir(path):
        files = []
        for folder, _, names in folders(path):
            stamps[folder] = stamp(folder)
            files += [os.path.join(folder, name) for name in names if name.endswith(SUFFIX)]
        first = _only_model(path, files, header)
    parts = [header(file) for file in _parts(first, header(first))]
    _check_parts(parts)
    index = GgufIndex(path, stamps=stamps, header=parts[0])
    for part in parts:
        for name, info in part.tensors.items():
            other = index.tensors.setdefault(name, info)
            if other is not info:
                raise ValueError(f"{info} is also in {other.file}; expected it once")
    return index


def _only_model(root: str, files: list[str], header: Callable[[str], GgufHeader]) -> str:
    """A file of the only model among these files."""
    models: dict[str, str] = {}
    for file in files:
        match = _PART.fullmatch(file)
        models.setdefault(f"{match[1]} of {match[3]}" if match else file, file)
    firsts = sorted(models.values())
    if len(firsts) > 1:
        firsts = [file for file in firsts if not _is_sidecar(header(file))] or firsts
    if len(firsts) > 1:
        names = ", ".join(os.path.relpath(file, root) for file in firsts)
        raise ValueError(f"{root}: {len(firsts)} GGUF models ({names}); name the one to use")
    return firsts[0]


def _is_sidecar(header: GgufHeader) -> bool:
    return (
        header.metadata.get(TYPE) in _SIDECAR_TYPES or header.architecture in _SIDECAR_ARCHITECTURES
    )


def _parts(file: str, header: GgufHeader) -> list[str]:
    """The files of all parts of the model that this file belongs to."""
    count = _split_number(header, "split.count", 1)
    match = _PART.fullmatch(file)
    named = int(match[3]) if match else 1
    if count <= 1 and named <= 1:
        return [file]
    if named != count:
        says = f"{count} parts" if count > 1 else "no other part"
        raise ValueError(
            f"{file}: split.count means {says}; expected a name that ends in"
            f" -00001-of-{max(count, named):05d}.gguf and so on, and the same number in both"
        )
    assert match is not None
    files = [f"{match[1]}-{i + 1:05d}-of-{match[3]}.gguf" for i in range(count)]
    for number, part in enumerate(files):
        if not os.path.lexists(part):
            raise ValueError(
                f"{part}: missing; {file} is a part of a model of {count} parts,"
                f" but part {number + 1} does not exist"
            )
    return files


def _check_parts(parts: list[GgufHeader]) -> None:
    """Raises ValueError unless the keys of the parts agree."""
    if len(parts) == 1:
        return
    first = parts[0]
    total = _split_number(first, "split.tensors.count", -1)
    for number, part in enumerate(parts):
        expected = (number, len(parts), total)
        found = tuple(_split_number(part, key, -1) for key in SPLIT)
        for key, value, wanted in zip(SPLIT, found, expected, strict=True):
            if value != wanted:
                raise ValueError(
                    f"{part.path}: {key} is {value if value >= 0 else 'missing'}; expected {wanted}"
                    f" (a part of another model?)"
                )
        if part.architecture not in (None, first.architecture):
            raise ValueError(
                f"{part.path}: general.architecture is {part.architecture!r}; {first.path} has"
                f" {first.architecture!r} (a part of another model?)"
            )
    have = sum(len(part.tensors) for part in parts)
    if have != total:
        raise ValueError(
            f"{first.path}: split.tensors.count is {total}, but its {len(parts)} parts have {have}"
            " tensors"
        )


def _split_number(header: GgufHeader, key: str, default: int) -> int:
    value = header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{header.path}: key {key!r} is {value!r}; expected a number")
    return value
