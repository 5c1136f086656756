"""Reads packed directories: maps each layer's file and returns its tiles unchanged.

The manifest is compared with each file's size when the directory is opened, and with each file's
header before it is mapped. Only `kt model verify` compares checksums, because that reads every
weight once more.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from ..weights.expert_tensors import MATRICES, Matrix
from ..weights.formats import BF16, INT4_GROUP, INT4_ROW, LayerForm
from ..weights.methods import Method, get_method
from ..weights.packed import PackedMatrix
from ..weights.store.layer_file import LayerSpec, layer_of_tensor
from ..weights.store.manifest import MANIFEST, LayerEntry, Manifest, read_manifest
from .ahead import will_need_bytes
from .base import Checkpoint, Sizes
from .header import TensorInfo, read_header
from .index import Index, stamp
from .open_files import OpenFiles
from .reader import LayerReader, in_words
from .stored import Stored


class PackedCheckpoint(Checkpoint):
    """The experts of a model in a packed directory."""

    def __init__(self, path: str) -> None:
        """Raises FileNotFoundError, PermissionError, or ValueError naming the file and the fault in
        the manifest or in the size of a file."""
        super().__init__(Index(path))
        manifest_path = os.path.join(path, MANIFEST)
        self._index.stamps[manifest_path] = stamp(manifest_path)
        self._manifest = read_manifest(path)
        for entry in self._manifest.layers.values():
            file = os.path.join(path, entry.spec.file)
            try:
                self._index.stamps[file] = stamp(file)
            except FileNotFoundError:
                raise ValueError(f"{file}: missing, but {manifest_path} names it") from None
            check_size(file, entry)
            for name, info in entry.spec.tensors.items():
                self._index.tensors[name] = TensorInfo(
                    name, file, info["dtype"], tuple(info["shape"]), *info["data_offsets"]
                )

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def method(self) -> str:
        """The method for which the experts are packed."""
        return self._manifest.method

    @property
    def model_type(self) -> str | None:
        return self._manifest.model_type

    def layers(self) -> list[int]:
        return list(self._manifest.layers)

    def where(self, layer_idx: int) -> str:
        return f"layers.{self._entry(layer_idx).spec.layer}.experts"

    def sizes(self, layer_idx: int) -> Sizes:
        return _sizes(self._entry(layer_idx).spec)

    def stored(self, layer_idx: int) -> Stored:
        self._entry(layer_idx)
        return Stored("a packed directory", self._packed_for().name)

    def _read_tensor(self, info: TensorInfo) -> torch.Tensor:
        layer_idx = layer_of_tensor(info.name)
        assert layer_idx is not None  # the names are from the manifest
        with _LayerFile(self, self._entry(layer_idx)) as file:
            file.map()
            return torch.from_numpy(file.tensor(info.name).copy())

    @contextmanager
    def _open_layer(
        self, layer_idx: int, sizes: Sizes, method: str | None
    ) -> Iterator[LayerReader]:
        entry = self._entry(layer_idx)
        spec = entry.spec
        form = self._check_method(spec, method)
        if _sizes(spec) != sizes:
            raise ValueError(
                f"{os.path.join(self.path, spec.file)}: layer {layer_idx} has"
                f" {in_words(_sizes(spec))}; expected {in_words(sizes)}"
            )
        with _LayerFile(self, entry) as file:
            file.map()
            yield LayerReader((*MATRICES, *spec.biases), form, file.expert)

    def _entry(self, layer_idx: int) -> LayerEntry:
        entry = self._manifest.layers.get(layer_idx)
        if entry is None:
            if layer_idx in (self._manifest.expected or ()):
                raise ValueError(
                    f"{self.path}: layer {layer_idx} is missing: the conversion was not finished; "
                    "run kt quant again with --resume"
                )
            raise self._no_experts(layer_idx)
        return entry

    def _packed_for(self) -> Method:
        try:
            return get_method(self._manifest.method)
        except ValueError as error:
            raise ValueError(f"{self.path}: packed for {error}") from None

    def _check_method(self, spec: LayerSpec, name: str | None) -> LayerForm:
        """The layer's form. Checks that the requested method, if any, produces it."""
        stored = self._packed_for()
        packed = stored.name
        if name is not None and not _same_weights(stored, get_method(name)):
            raise ValueError(
                f"{self.path}: packed for method {packed}, but method {name} was requested"
            )
        if not _makes(stored, spec.form):
            raise ValueError(
                f"{os.path.join(self.path, MANIFEST)}: layer {spec.layer} is {spec.form}, which "
                f"method {packed} does not produce"
            )
        return spec.form


class _LayerFile(OpenFiles):
    """A layer's file. Returned arrays stay valid: the mapping is closed with the last array that
    refers to it."""

    def __init__(self, checkpoint: PackedCheckpoint, entry: LayerEntry) -> None:
        super().__init__(checkpoint._index)
        self._spec = entry.spec
        self._path = os.path.join(checkpoint.path, entry.spec.file)
        self._header = checkpoint.manifest.header(entry.spec)

    def map(self) -> None:
        """Maps the file after comparing its header. Must be called first."""
        descriptor = self.descriptor(self._path)
        check_header(self._path, self._header)
        self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)

    def tensor(self, name: str, expert: int | None = None) -> np.ndarray:
        """A tensor, or one expert's part of it, as stored."""
        info = self._spec.tensors[name]
        dtype = np.float32 if info["dtype"] == "F32" else np.uint8
        shape = info["shape"] if expert is None else info["shape"][1:]
        begin, end = (len(self._header) + offset for offset in info["data_offsets"])
        if expert is not None:
            size = (end - begin) // info["shape"][0]
            begin, end = begin + expert * size, begin + (expert + 1) * size
        return np.frombuffer(memoryview(self._map)[begin:end], dtype).reshape(shape)

    def expert(self, number: int) -> dict[str, Matrix]:
        """Reads the fields of one expert in one go, instead of page by page while they are
        copied."""
        spec = self._spec
        self.descriptor(self._path)  # raises if the file has changed
        fields: dict[str, Matrix] = {}
        for matrix, name in enumerate(MATRICES):
            tiles = self.tensor(spec.tensor(name), number)
            will_need_bytes(tiles.ctypes.data, tiles.nbytes)
            form = getattr(spec.form, name)
            fields[name] = PackedMatrix(form, spec.matrix_shape(matrix), tiles)
        for name in spec.biases:
            fields[name] = torch.from_numpy(self.tensor(spec.tensor(name), number).copy())
        return fields


def is_packed(path: str) -> bool:
    """Whether there is a packed directory at `path`."""
    return os.path.lexists(os.path.join(path, MANIFEST))


def refuse_layer_files(index: Index) -> None:
    """Raises ValueError for files of a packed directory without their manifest."""
    for name, info in index.tensors.items():
        if layer_of_tensor(name) is not None:
            raise ValueError(
                f"{info}: this file belongs to a packed directory; give the folder that holds it "
                f"and its {MANIFEST}"
            )


def check_size(path: str, entry: LayerEntry) -> None:
    """Raises ValueError unless a layer's file has the size in the manifest; OSError if it is
    missing."""
    size = os.stat(path).st_size
    if size != entry.bytes:
        raise ValueError(f"{path}: {size} bytes, but {MANIFEST} has {entry.bytes}")


def check_header(path: str, expected: bytes) -> None:
    """Raises ValueError unless a layer's file begins with the header that the manifest implies."""
    with open(path, "rb") as file:
        found = file.read(len(expected))
    if found != expected:
        read_header(path)  # raises if this is not a safetensors file
        raise ValueError(
            f"{path}: its header does not match {MANIFEST}: the file is damaged or of another model"
        )


def _sizes(spec: LayerSpec) -> Sizes:
    return spec.num_experts, spec.hidden_size, spec.moe_intermediate_size


def _makes(method: Method, form: LayerForm) -> bool:
    """Whether the method can have produced a layer of that form."""
    made = method.form
    if made is not None and not method.quantised:
        if made.format == INT4_ROW and form.down.format == INT4_GROUP:
            form = replace(form, down=made)  # kt-kernel's columns in parts
        return form == LayerForm.same(made)
    # Methods that keep weights keep dense ones beside quantised ones.
    return all(one.format in (*method.formats, BF16) for one in form)


def _same_weights(a: Method, b: Method) -> bool:
    return replace(a, name="") == replace(b, name="")
