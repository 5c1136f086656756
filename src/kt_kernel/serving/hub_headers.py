"""Headers of a repository's weights without their values, which tell what a model consists of."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from huggingface_hub import HfApi, snapshot_download

from .hub import take_all

_AT_ONCE = 8  # requests


class HeadersOnly:
    """Takes the JSON files of a repository, and of its safetensors files only the headers, unless
    they are in the cache; for `hub.local_path`. Files of other formats are taken as a whole.

    The folder that stands for the repository exists as long as the process. Its files of weights
    have their sizes, and take no space: their values read as zeros.

    Attributes:
        absent: bytes of weights that are not there.
    """

    absent = 0

    def __call__(self, where: dict[str, Any], wanted: Sequence[str]) -> str:
        kept = snapshot_download(**where, allow_patterns=["*.json"])
        absent = [name for name in wanted if not os.path.exists(os.path.join(kept, name))]
        if not absent or any(not name.endswith(".safetensors") for name in wanted):
            return take_all(where, wanted)
        folder = tempfile.mkdtemp(prefix="kt-headers-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        shutil.copytree(kept, folder, copy_function=os.symlink, dirs_exist_ok=True)
        revision = os.path.basename(kept)  # the commit, whatever happens to the branch

        def write(name: str) -> int:
            found = HfApi().parse_safetensors_file_metadata(
                where["repo_id"], name, revision=revision
            )
            return _write_header(os.path.join(folder, name), found)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            self.absent = sum(pool.map(write, absent))
        return folder


def _write_header(path: str, found: Any) -> int:
    """Writes a file with this header. found: SafetensorsFileMetadata. Returns the bytes of the
    tensors."""
    entries: dict[str, Any] = {
        name: {"dtype": one.dtype, "shape": one.shape, "data_offsets": one.data_offsets}
        for name, one in found.tensors.items()
    }
    size = max((one.data_offsets[1] for one in found.tensors.values()), default=0)
    if found.metadata:
        entries["__metadata__"] = found.metadata
    text = json.dumps(entries).encode()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    return size
