"""Identifies a checkpoint without reading all of it."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING

from ..runtime.files import reading

if TYPE_CHECKING:
    from .base import Checkpoint

_SAMPLE = 4096  # bytes
_SAMPLES = 16  # per file, evenly spaced, including its first and last bytes


def fingerprint(checkpoint: Checkpoint) -> str:
    """SHA-256 of the tensors' names, dtypes and shapes, and of samples of each file with tensors.

    A copy in another place has the same fingerprint. A model with the same shapes but other weights
    has a different one. Raises OSError if a file cannot be read.
    """
    root = checkpoint.path
    if not os.path.isdir(root):
        root = os.path.dirname(root)
    digest = hashlib.sha256()
    tensors = sorted((i.name, i.dtype, i.shape) for i in checkpoint.tensors.values())
    digest.update(json.dumps([checkpoint.model_type, tensors]).encode())
    for path in sorted({info.file for info in checkpoint.tensors.values()}):
        with reading(path) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(json.dumps([os.path.relpath(path, root), size]).encode())
            for sample in range(_SAMPLES):
                offset = max(0, size - _SAMPLE) * sample // (_SAMPLES - 1)
                digest.update(os.pread(file.fileno(), _SAMPLE, offset))
    return digest.hexdigest()
