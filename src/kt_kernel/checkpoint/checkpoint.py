"""Opens checkpoints. All callers share one opened checkpoint per path."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterable

from ..weights.expert_tensors import ExpertTensors
from ..weights.store.manifest import MANIFEST
from .base import Checkpoint
from .gguf.checkpoint import GgufCheckpoint
from .gguf.files import is_gguf, read_gguf_index
from .index import read_index
from .kt_kernel.folder import read_kt_folder
from .kt_kernel.packed import KtPackedCheckpoint, find_packed
from .packed import PackedCheckpoint, is_packed, refuse_layer_files
from .paths import check_path
from .safetensors.checkpoint import HuggingFaceCheckpoint

_opened: dict[str, Checkpoint] = {}
_lock = threading.Lock()


def _renew_lock_after_fork() -> None:  # another thread of the parent may have held it
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock_after_fork)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a safetensors file, an index (*.safetensors.index.json), a GGUF file (any part of a
    split model), a folder (searched recursively), or a packed directory.

    Reads and checks all headers, but no tensor data. Calls with the same path share the result
    until something there changes.

    Raises FileNotFoundError, PermissionError, or ValueError naming file and tensor; see
    `kt_kernel.checkpoint.index` and `kt_kernel.checkpoint.gguf.files`. Raises TypeError or
    ValueError if `path` cannot be a path.
    """
    path = os.path.abspath(check_path("path", path))
    with _lock:
        checkpoint = _opened.get(path)
        if checkpoint is None or checkpoint.changed():
            try:
                checkpoint = _opened[path] = _read(path)
            except NotADirectoryError as error:  # the path goes through a file
                raise FileNotFoundError(errno.ENOENT, error.strerror, path) from None
        return checkpoint


def _read(path: str) -> Checkpoint:
    if os.path.basename(path) == MANIFEST:
        path = os.path.dirname(path)
    if is_packed(path):
        return PackedCheckpoint(path)
    if is_gguf(path):
        return GgufCheckpoint(read_gguf_index(path))
    index = read_kt_folder(path) or read_index(path)
    refuse_layer_files(index)
    if find_packed(index.tensors):
        return KtPackedCheckpoint(index)
    return HuggingFaceCheckpoint(index)


def read_experts(
    path: str | os.PathLike[str],
    layer_idx: int,
    num_experts: int,
    hidden_size: int,
    moe_intermediate_size: int,
    experts: Iterable[int] | None = None,
    method: str | None = None,
) -> ExpertTensors:
    """`open_checkpoint(path).read_experts(...)`."""
    return open_checkpoint(path).read_experts(
        layer_idx, num_experts, hidden_size, moe_intermediate_size, experts, method
    )
