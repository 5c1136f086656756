"""Reads packed directories: returns the tiles of each layer's file unchanged.

The manifest is compared with each file's size when the directory is opened, and with each file's
header before its tiles are read. Only `kt model verify` compares checksums, because that reads
every weight once more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ..runtime.files import reading
from ..weights.expert_tensors import MATRICES, Matrix
from ..weights.formats import BF16, INT4_GROUP, INT4_ROW, LayerForm
from ..weights.methods import Method, get_method
from ..weights.packed import PackedMatrix
from ..weights.store.layer_file import LayerSpec, layer_of_tensor
from ..weights.store.manifest import MANIFEST, LayerEntry, Manifest, read_manifest
from .base import Checkpoint, Sizes
from .header import TensorInfo, read_header
from .index import Index, stamp
from .open_files import OpenFiles, Piece, Pieces
from .reader import LayerReader, in_words
from .safetensors.files import Files
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
            start = entry.bytes - entry.spec.data_bytes
            for name, info in entry.spec.tensors.items():
                begin, end = (start + offset for offset in info["data_offsets"])
                self._index.tensors[name] = TensorInfo(
                    name, file, info["dtype"], tuple(info["shape"]), begin, end
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
        with Files(self._index) as files:
            self._check_header(self._entry(layer_idx).spec, files)
            return files.read(info)

    @contextmanager
    def _open_layer(
        self, layer_idx: int, sizes: Sizes, method: str | None
    ) -> Iterator[tuple[LayerReader, Pieces]]:
        entry = self._entry(layer_idx)
        spec = entry.spec
        form = self._check_method(spec, method)
        if _sizes(spec) != sizes:
            raise ValueError(
                f"{os.path.join(self.path, spec.file)}: layer {layer_idx} has"
                f" {in_words(_sizes(spec))}; expected {in_words(sizes)}"
            )
        with Files(self._index) as files:
            self._check_header(spec, files)
            fields = (*MATRICES, *spec.biases)
            infos = {field: self._index.tensors[spec.tensor(field)] for field in fields}

            def pieces(expert: int) -> list[Piece]:
                return [(info, expert, spec.num_experts) for info in infos.values()]

            def read(expert: int) -> dict[str, Matrix]:
                found: dict[str, Matrix] = {}
                for field, info in infos.items():
                    data = files.read(info, expert)
                    found[field] = data
                    if field in MATRICES:
                        shape = spec.matrix_shape(MATRICES.index(field))
                        found[field] = PackedMatrix(getattr(form, field), shape, data.numpy())
                return found

            yield LayerReader(fields, form, read), Pieces(files, pieces)

    def _check_header(self, spec: LayerSpec, files: OpenFiles) -> None:
        """Raises ValueError if a layer's file has changed, or has another header than the manifest
        implies."""
        path = os.path.join(self.path, spec.file)
        files.check(path)
        check_header(path, self._manifest.header(spec))

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
    with reading(path) as file:
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
