"""Finds the files of a checkpoint and the tensors in each.

A path is a safetensors file, an index (`*.safetensors.index.json`), or a folder, which is searched
recursively. If a folder has an index, only the files that it lists count, in that folder and below,
as in other tools. Other files there, such as another format of the same model or shards of an
earlier version, are ignored. Hidden folders (download caches) and packed copies (`kt-packed`) are
not searched.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..runtime.files import need_file, parse_object, reading
from ..weights.store.manifest import PACKED_COPY
from .header import TensorInfo, read_header

INDEX_SUFFIX = ".safetensors.index.json"
MAIN_INDEX = "model" + INDEX_SUFFIX

_logger = logging.getLogger("kt_kernel.checkpoint")

_SHARD = re.compile(r"(.*)-([0-9]{1,9})-of-([0-9]{1,9})\.safetensors", re.DOTALL)

Stamp = tuple[int, int, int, int]


def stamp(path: str | int) -> Stamp:
    """Identifies a state of a file or folder, given by path or descriptor. Raises OSError."""
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass
class Index:
    """The tensors of a checkpoint by name, its config.json if it has one, and the state of every
    file and folder that was read (`stamps`, by path).

    faults: what is wrong with single tensors, by name. Only whoever needs such a tensor raises an
    error: checkpoints often have other tensors that nobody reads.
    """

    path: str
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    config: dict[str, Any] | None = None
    config_path: str | None = None
    stamps: dict[str, Stamp] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)

    def need(self, infos: Iterable[TensorInfo]) -> None:
        """Raises ValueError if one of these tensors has a fault."""
        for info in infos:
            if info.name in self.faults:
                raise ValueError(self.faults[info.name])

    def explain(self, error: ValueError) -> ValueError:
        """The error, followed by the fault of a tensor that it names, if there is one."""
        text = str(error)
        known = [fault for name, fault in self.faults.items() if repr(name) in text]
        return ValueError(f"{text}; {known[0]}") if known else error

    def changed(self, folders: bool = True) -> str | None:
        """The first path that has changed since it was read, or None. folders: whether files added
        to or removed from a folder count as changes."""
        for path, before in self.stamps.items():
            if not folders and os.path.isdir(path):
                continue
            try:
                if stamp(path) != before:
                    return path
            except OSError:
                return path
        return None


def read_index(path: str) -> Index:
    """Reads all headers at `path`, but no tensor data.

    Raises FileNotFoundError if there is nothing to read, PermissionError naming the file if it is
    not readable, and ValueError naming file and tensor for a fault in a header, shards of two
    models or missing shards without an index, or an index that names a missing file.

    A tensor in two files, and one that an index lists but no file has, are `faults`. Where an index
    and the files that it lists disagree, the files count, as in the engines, and a warning is
    logged.
    """
    path = os.path.abspath(path)
    index = Index(path)
    index.stamps[path] = stamp(path)
    if os.path.isdir(path):
        _read_folder(index, path)
    elif path.endswith(".json"):
        _read_index_file(index, path)
    else:
        _add_file(index, path)
    read_config(index)
    return index


def _read_folder(index: Index, root: str) -> None:
    others: list[str] = []
    for folder, chosen, files in walk(root):
        index.stamps[folder] = stamp(folder)
        if chosen:
            _read_index_file(index, chosen)
            continue
        for path in files:
            if path.endswith(".safetensors"):
                _add_file(index, path)
            else:
                others.append(path)
    if not index.tensors:
        _explain_nothing(root, others)


def walk(root: str) -> Iterator[tuple[str, str | None, list[str]]]:
    """Yields each searched folder, starting with `root`: its path, its index or None, its files.

    Raises OSError for a folder that cannot be read, ValueError for one with several indices.
    """

    for folder, below, files in folders(root):
        chosen = _choose_index(folder, files)
        if chosen:
            below.clear()
        else:
            _check_shards(folder, files)
        yield (
            folder,
            chosen and os.path.join(folder, chosen),
            [os.path.join(folder, name) for name in files],
        )


def folders(root: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields each searched folder, starting with `root`: its path, the names of its subfolders, and
    the names of its files, both sorted. Subfolders removed from the list are not searched.

    Raises OSError for a folder that cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    for folder, below, files in os.walk(root, onerror=fail):
        below[:] = sorted(n for n in below if not n.startswith(".") and n != PACKED_COPY)
        yield folder, below, sorted(files)


def _check_shards(folder: str, files: list[str]) -> None:
    """Raises ValueError if a folder without an index has shards of two models, or lacks some."""
    first: dict[str, tuple[str, str]] = {}
    numbers: dict[str, set[int]] = {}
    for name in files:
        match = _SHARD.fullmatch(name)
        if match:
            stem, number, count = match.groups()
            other, expected = first.setdefault(stem, (name, count))
            if count != expected:
                raise ValueError(
                    f"{os.path.join(folder, name)}: one of {int(count)} shards, but {other} is one"
                    f" of {int(expected)}: two models in one folder, without an index"
                )
            numbers.setdefault(stem, set()).add(int(number))
    for stem, found in numbers.items():
        name, count = first[stem]
        if len(found) < int(count):  # they count from 0 or 1
            missing = next(n for n in range(min(found | {1}), int(count) + 1) if n not in found)
            raise ValueError(
                f"{os.path.join(folder, name)}: one of {int(count)} shards, but {len(found)} are"
                f" there and number {missing} is missing, without an index; name single files to"
                " read them alone"
            )


def _choose_index(folder: str, files: list[str]) -> str | None:
    found = sorted(name for name in files if name.endswith(INDEX_SUFFIX))
    if len(found) > 1 and MAIN_INDEX not in found:
        raise ValueError(
            f"{folder}: {len(found)} indices ({', '.join(found)}); give the path of one of them"
        )
    return MAIN_INDEX if MAIN_INDEX in found else found[0] if found else None


def _explain_nothing(root: str, others: list[str]) -> None:
    kinds = (
        ((".kt",), "name the folder that has kt-kernel's folders _layer_<number> in it"),
        ((".bin", ".pt", ".pth"), "PyTorch pickle files are not read; convert them to safetensors"),
    )
    for suffixes, reason in kinds:
        for name in others:
            if name.endswith(suffixes):
                raise ValueError(f"{root}: {reason} (found {name}); expected safetensors")
    copy = os.path.join(root, PACKED_COPY)
    hint = f"; {copy} is searched only if it is named" if os.path.isdir(copy) else ""
    raise FileNotFoundError(f"{root}: no *.safetensors file in this folder or below it{hint}")


def _read_index_file(index: Index, path: str) -> None:
    index.stamps[path] = stamp(path)
    files = listed_files(path)
    problems: list[str] = []
    for file in files:
        present = _add_file(index, file) if os.path.lexists(file) else None
        differences = disagreements(path, files, file, present)
        if present is None:
            raise ValueError(next(differences))
        problems += differences
    for file, names in files.items():
        for name in names - index.tensors.keys():
            index.faults[name] = f"{file}: tensor {name!r} is missing, but {path} lists it"
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        _logger.warning("kt: the files count where their index differs: %s%s", problems[0], more)


def listed_files(path: str) -> dict[str, set[str]]:
    """The files that an index names, with the names of the tensors in each. Raises ValueError for
    an invalid index."""
    content = read_json(path)
    names = content.get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ValueError(f"{path}: no weight_map; expected the index of a safetensors checkpoint")
    folder = os.path.dirname(path)
    files: dict[str, set[str]] = {}
    for name, file in names.items():
        if not isinstance(file, str) or os.path.isabs(file) or ".." in file.split("/"):
            raise ValueError(
                f"{path}: tensor {name!r} is in {file!r}; expected a path below {folder}"
            )
        if not file.endswith(".safetensors"):
            raise ValueError(f"{path}: tensor {name!r} is in {file!r}; expected a safetensors file")
        files.setdefault(os.path.join(folder, os.path.normpath(file)), set()).add(name)
    return dict(sorted(files.items()))


def disagreements(
    path: str, files: dict[str, set[str]], file: str, present: Iterable[str] | None
) -> Iterator[str]:
    """Yields the differences between an index and one of its files. files: the result of
    `listed_files`. present: the tensors in the file, or None if it does not exist."""
    listed = files[file]
    if present is None:
        yield (
            f"{file}: missing, but {path} lists {len(listed)} tensors in it, among them"
            f" {min(listed)!r}"
        )
        return
    found = set(present)
    for name in sorted(listed - found):
        yield f"{file}: tensor {name!r} is missing, but {path} lists it"
    for name in sorted(found - listed):
        others = [other for other, names in files.items() if name in names]
        where = f"is in {others[0]}" if others else "does not exist"
        yield f"{file}: holds tensor {name!r}, which according to {path} {where}"


def _add_file(index: Index, path: str) -> dict[str, TensorInfo]:
    index.stamps[path] = stamp(path)
    tensors = read_header(path)
    for name, info in tensors.items():
        first = index.tensors.setdefault(name, info)
        if first is not info:
            index.faults[name] = f"{info} is also in {first.file}; expected it once"
    return tensors


def read_config(index: Index) -> None:
    """Adds the config.json of the path or else the only one in the folders of its files."""
    root = index.path if os.path.isdir(index.path) else os.path.dirname(index.path)
    folders = {os.path.dirname(info.file) for info in index.tensors.values()} - {root}
    for group in ([root], sorted(folders)):
        found = [p for p in (os.path.join(f, "config.json") for f in group) if os.path.lexists(p)]
        if len(found) > 1:
            raise ValueError(f"{index.path}: more than one model below it: {', '.join(found)}")
        if found:
            index.stamps[found[0]] = stamp(found[0])
            index.config, index.config_path = read_json(found[0]), found[0]
            return


def read_json(path: str) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises ValueError naming the file if it is not one."""
    need_file(path, "a JSON object")
    with reading(path) as file:
        return parse_object(file.read(), f"{path}: ")
