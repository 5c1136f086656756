"""Checks the files of a model against its manifest or its index."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ..checkpoint import open_checkpoint
from ..checkpoint.header import read_header
from ..checkpoint.index import disagreements, listed_files, walk
from ..checkpoint.packed import check_header, check_size, is_packed
from ..checkpoint.paths import check_path
from ..runtime.files import PARTIAL
from ..runtime.machine import usable_cores
from ..runtime.text import ranges
from ..weights.store.atomic import sha256_of, until_left
from ..weights.store.manifest import LayerEntry, Manifest, read_manifest


@dataclass
class Verdict:
    """files, bytes: the number of checked files, and their bytes. against: what they were compared
    with. problems: one line each, with the file's name. notes: harmless oddities."""

    against: str
    files: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Watcher:
    """Receives the progress of a verification; does nothing by itself. Several threads call it."""

    def begin(self, total: int) -> None:
        """`total` bytes will be read."""

    def read(self, count: int) -> None:
        """`count` more bytes were read."""


def verify(path: str, watcher: Watcher | None = None) -> Verdict:
    """Checks a packed directory (sizes, headers and checksums of all files), a Hugging Face
    checkpoint (every tensor of the index in its file, all headers and sizes; there are no checksums
    to compare with), or another checkpoint (headers, or names, and sizes of its files).

    Raises OSError or ValueError if there is nothing to compare with.
    """
    path = os.path.abspath(check_path("path", path))
    if is_packed(path):
        return _verify_packed(path, watcher or Watcher())
    return _verify_checkpoint(path)


def _verify_packed(folder: str, watcher: Watcher) -> Verdict:
    manifest = read_manifest(folder)
    entries = list(manifest.layers.values())
    watcher.begin(sum(entry.bytes for entry in entries))
    verdict = Verdict("kt_manifest.json", len(entries), sum(entry.bytes for entry in entries))
    if manifest.missing:
        verdict.problems.append(
            f"{folder}: layers {ranges(manifest.missing)} are missing: the conversion was not "
            "finished; run kt quant again with --resume"
        )
    with ThreadPoolExecutor(usable_cores()) as threads, until_left(watcher.read) as read:
        for problem in threads.map(lambda e: _problem(folder, manifest, e, read), entries):
            verdict.problems += [problem] if problem else []
    known = {entry.spec.file for entry in entries}
    for name in sorted(os.listdir(folder)):
        if name not in known and name.endswith((".safetensors", PARTIAL)):
            verdict.notes.append(
                f"{os.path.join(folder, name)}: not in kt_manifest.json, so it is not used"
            )
    return verdict


def _problem(
    folder: str, manifest: Manifest, entry: LayerEntry, progress: Callable[[int], None]
) -> str | None:
    path = os.path.join(folder, entry.spec.file)
    try:
        check_size(path, entry)
        check_header(path, manifest.header(entry.spec))
        found = sha256_of(path, progress)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{path}: {error.strerror}"
    if found != entry.sha256:
        return f"{path}: SHA-256 is {found}, but kt_manifest.json has {entry.sha256}"
    return None


def _verify_checkpoint(path: str) -> Verdict:
    verdict = Verdict("the files' headers")
    for index, file, listed in _files(path):
        if index:
            verdict.against = os.path.basename(index)
        verdict.files += 1
        try:
            present = read_header(file)
            verdict.bytes += os.path.getsize(file)
        except FileNotFoundError:
            present = None
        except ValueError as error:
            verdict.problems.append(str(error))
            continue
        except OSError as error:
            verdict.problems.append(f"{file}: {error.strerror}")
            continue
        if index:
            verdict.problems += disagreements(index, listed, file, present)
    if not verdict.problems:
        checkpoint = open_checkpoint(path)  # finds faults across files, and paths without any
        verdict.problems += checkpoint.faults
        if not verdict.files:  # not safetensors; opening has checked it
            files = {info.file for info in checkpoint.tensors.values()}
            verdict.files, verdict.bytes = len(files), sum(map(os.path.getsize, files))
    return verdict


def _files(path: str) -> Iterator[tuple[str | None, str, dict[str, set[str]]]]:
    """For each file at `path`: its index or None, the file, and the tensors in the index."""
    if path.endswith(".json"):
        folders: Iterable[tuple[str, str | None, list[str]]] = [("", path, [])]
    elif os.path.isdir(path):
        folders = walk(path)
    else:
        folders = [("", None, [path])]
    for _, index, files in folders:
        if index:
            listed = listed_files(index)
            yield from ((index, file, listed) for file in listed)
        else:
            yield from ((None, file, {}) for file in files if file.endswith(".safetensors"))
