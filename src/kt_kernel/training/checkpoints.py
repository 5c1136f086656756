"""Checkpoints of a run: which are whole, and removing old ones.

Trainer writes a checkpoint's files one after the other. A checkpoint is whole if the mark that is
written last is there and names its files with their sizes.
"""

from __future__ import annotations

import json
import os
import re
import shutil

from ..runtime.files import parse_object, replace_file

MARK = "kt_checkpoint.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def mark_whole(checkpoint: str) -> None:
    """Marks a checkpoint whose files are all written. They are on the disk when this returns."""
    sizes = {}
    for name in sorted(os.listdir(checkpoint)):
        path = os.path.join(checkpoint, name)
        if name != MARK and os.path.isfile(path):
            with open(path, "rb") as file:
                os.fsync(file.fileno())
            sizes[name] = os.path.getsize(path)
    text = json.dumps({"files": sizes}, indent=2)
    replace_file(os.path.join(checkpoint, MARK), text, durable=True)


def is_whole(checkpoint: str) -> bool:
    """Whether a checkpoint has its mark, and all files that it names."""
    try:
        with open(os.path.join(checkpoint, MARK), "rb") as file:
            sizes = parse_object(file.read(), "")["files"]
        return all(os.path.getsize(os.path.join(checkpoint, n)) == s for n, s in sizes.items())
    except (OSError, ValueError, KeyError, AttributeError):
        return False


def checkpoints(folder: str) -> list[tuple[int, str]]:
    """Steps and paths of all checkpoints in a folder, whole or not, by their steps."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = ((_NAME.fullmatch(name), name) for name in names)
    return sorted((int(m[1]), os.path.join(folder, name)) for m, name in found if m)


def last_whole(folder: str) -> tuple[int, str] | None:
    """Step and path of the newest whole checkpoint in a folder; None if there is none."""
    return next((c for c in reversed(checkpoints(folder)) if is_whole(c[1])), None)


def remove_old(folder: str, keep: int) -> None:
    """Removes all but the newest ``keep`` whole checkpoints, and parts of older ones."""
    whole = [step for step, path in checkpoints(folder) if is_whole(path)]
    for step, path in checkpoints(folder):
        if whole[keep:] and step < whole[-keep]:
            shutil.rmtree(path)
