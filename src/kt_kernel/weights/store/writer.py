"""A packed directory while layers are added to it, one process at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...runtime.files import PARTIAL
from ..expert_tensors import MATRICES
from .atomic import AtomicFile
from .layer_file import LayerSpec
from .lock import LOCK, only_writer
from .manifest import MANIFEST, LayerEntry, Manifest, read_manifest


@dataclass(eq=False)
class PackedLayer:
    """A layer to be written: the compiled layer, with expert e in slot e, and the biases that
    `spec` names, float32 [E, n]."""

    spec: LayerSpec
    core: Any
    biases: dict[str, np.ndarray] = field(default_factory=dict)

    def read(self, expert: int, matrix: int, tiles: np.ndarray) -> None:
        """Copies the packed tiles of gate, up or down (0, 1, 2) to uint8 [tiles, tile bytes]."""
        assert tiles.shape == self.spec.expert_shape(matrix)
        self.core.save_packed(expert, matrix, tiles)


class PackedWriter:
    """Adds layers to the packed directory `folder`, which is created if needed.

        with PackedWriter(folder, model) as writer:
            writer.add(layer)

    model: the content of a new manifest; an existing manifest must agree with it. The manifest is
    rewritten after each layer, and a layer counts once the manifest names it. The directory
    therefore always holds complete layers of one model.

    wait: whether to wait for another writing process instead of raising.

    Entering raises ValueError if the directory is of another model, or has other files and no
    manifest, BlockingIOError if another process is writing, and OSError naming the path.
    """

    def __init__(self, folder: str | os.PathLike[str], model: Manifest, wait: bool = False) -> None:
        self.folder, self.manifest = os.path.abspath(folder), model
        self._wait = wait

    def __enter__(self) -> PackedWriter:
        with ExitStack() as stack:
            os.makedirs(self.folder, exist_ok=True)
            stack.enter_context(only_writer(self.folder, self._wait))
            self._begin()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _begin(self) -> None:
        found = manifest_if_any(self.folder)
        if found is None:
            self._write_manifest(self.manifest)
            return
        refuse_other(self.folder, self.manifest, found)
        self.manifest = found

    def add(self, layer: PackedLayer, progress: Callable[[int], None] = lambda count: None) -> None:
        """Writes one layer and names it in the manifest.

        progress: called with the bytes of each piece written; an exception from it ends writing.
        Raises ValueError if the layer already exists with other bytes, and OSError naming the file.
        """
        spec = layer.spec
        with AtomicFile(os.path.join(self.folder, spec.file)) as file:

            def write(data: Any) -> None:
                file.write(data)
                progress(memoryview(data).nbytes)

            write(self.manifest.header(spec))
            for matrix in range(len(MATRICES)):
                tiles = np.empty(spec.expert_shape(matrix), np.uint8)
                for expert in range(spec.num_experts):
                    layer.read(expert, matrix, tiles)
                    write(tiles)
            for name in spec.biases:
                write(layer.biases[name])
            entry = LayerEntry(spec, file.bytes, file.sha256)
            if self.manifest.layers.get(spec.layer, entry) != entry:
                raise ValueError(
                    f"{file.path}: layer {spec.layer} already exists with other weights; "
                    "choose another folder"
                )
            file.commit()
        self._write_manifest(self.manifest.with_layer(entry))

    def remove(self, layers: Iterable[int]) -> None:
        """Removes layers from the manifest, so that they can be added again."""
        self._write_manifest(self.manifest.without(set(layers)))

    def _write_manifest(self, manifest: Manifest) -> None:
        with AtomicFile(os.path.join(self.folder, MANIFEST)) as file:
            file.write(manifest.to_json().encode())
            file.commit()
        self.manifest = manifest


def refuse_other(folder: str, wanted: Manifest, found: Manifest) -> None:
    """Raises ValueError if a directory has another model or other settings."""
    if different := wanted.differences(found):
        raise ValueError(
            f"{folder} holds a different conversion ({'; '.join(different)}); choose another folder"
        )


def manifest_if_any(folder: str) -> Manifest | None:
    """The manifest of a directory to write to; None if it does not exist or is empty.

    Raises ValueError for a file or a directory with other content, and what `read_manifest` raises.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        raise ValueError(f"{folder}: this is a file; expected a folder") from None
    if MANIFEST in names:
        return read_manifest(folder)
    others = sorted(set(names) - {MANIFEST + PARTIAL, LOCK})
    if others:
        raise ValueError(
            f"{folder}: holds other files ({', '.join(others[:3])}{', …' if others[3:] else ''}) "
            "and no kt_manifest.json; choose an empty or a new folder"
        )
    return None
