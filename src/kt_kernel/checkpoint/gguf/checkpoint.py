"""Checkpoints in GGUF files, whose experts keep ggml's quantisation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...weights.expert_tensors import BIASES, MATRICES, Matrix
from ...weights.formats import BF16, LayerForm
from ...weights.methods import GGUF_METHOD, Method, get_method
from ..base import Checkpoint, Sizes
from ..header import TensorInfo
from ..open_files import OpenFiles, Pieces
from ..reader import LayerReader, other_model
from ..stored import Stored, dense_weights
from .architectures import ARCHITECTURES, REFUSED
from .blocks import DENSE, form_of, forms, row_bytes, to_dense, to_matrix
from .files import GgufIndex
from .layout import GgufLayer, check_metadata, find_layer, layer_tensors
from .types import BY_NAME

ANY_TYPE = GGUF_METHOD  # the method that accepts all types


class GgufCheckpoint(Checkpoint):
    """A model in GGUF files. dtypes are ggml's types; shapes are row-major."""

    _index: GgufIndex

    def __init__(self, index: GgufIndex) -> None:
        super().__init__(index)
        self._layers = layer_tensors(index.tensors)

    @property
    def architecture(self) -> str | None:
        """The architecture according to the file, such as "qwen3moe"."""
        return self._index.header.architecture

    @property
    def model_type(self) -> str | None:
        return ARCHITECTURES.get(self.architecture or "")

    def layers(self) -> list[int]:
        return sorted(self._layers)

    def where(self, layer_idx: int) -> str:
        return self._layer(layer_idx).where

    def sizes(self, layer_idx: int) -> Sizes:
        return self._layer(layer_idx).sizes()

    def stored(self, layer_idx: int) -> Stored:
        types = {source.dtype for source in self._layer(layer_idx).matrices.values()}
        return dense_weights(ANY_TYPE) if types <= DENSE.keys() else Stored("GGUF", ANY_TYPE)

    def _read_tensor(self, info: TensorInfo) -> torch.Tensor:
        """Returns the blocks of a quantised tensor as uint8 [..., bytes of a row].

        Raises ValueError for a type whose blocks are unknown.
        """
        if info.dtype not in BY_NAME:
            raise ValueError(f"{info} is of ggml type {info.dtype}; known: {', '.join(BY_NAME)}")
        with OpenFiles(self._index) as files:
            data = files.read_part(info)
        if info.dtype in DENSE:
            return to_dense(info, data).view(info.shape)
        return data.view(*info.shape[:-1], row_bytes(info))

    @contextmanager
    def _open_layer(
        self, layer_idx: int, sizes: Sizes, method: str | None
    ) -> Iterator[tuple[LayerReader, Pieces]]:
        layer = self._layer(layer_idx)
        chosen = None if method is None else get_method(method)
        try:
            layer.check(*sizes)
        except ValueError as error:
            raise ValueError(f"{error}{other_model(layer.sizes, sizes)}") from None
        check_metadata(self._index.header, sizes)
        form = _form(layer, chosen)
        fields = MATRICES + BIASES if layer.biases else MATRICES
        with OpenFiles(self._index) as files:
            reader = LayerReader(fields, form, lambda e: _read(layer, sizes[0], e, files))
            yield reader, Pieces(files, lambda e: layer.pieces(e, sizes[0]))

    def _layer(self, layer_idx: int) -> GgufLayer:
        reason = REFUSED.get(self.architecture or "")
        if reason:
            raise ValueError(
                f"{self._index.header.path}: architecture {self.architecture!r} is not supported:"
                f" {reason}"
            )
        if layer_idx not in self._layers:
            raise self._no_experts(layer_idx)
        return find_layer(layer_idx, self._layers[layer_idx])


def _form(layer: GgufLayer, method: Method | None) -> LayerForm | None:
    """The form in which the layer's weights are returned; None if they are dense. Raises ValueError
    for a type that the method does not accept, or that no kernel supports."""
    forms = {matrix: form_of(source.some) for matrix, source in layer.matrices.items()}
    for bias in layer.biases.values():
        if bias.dtype not in DENSE:
            raise ValueError(
                f"{bias.some} is of type {bias.dtype}; expected a bias of {' or '.join(DENSE)}"
            )
    if method is not None and not method.mixed:
        _check_method(layer, method)
    dense = all(form.format == BF16 for form in forms.values())
    return None if dense else LayerForm(**forms)


def _check_method(layer: GgufLayer, method: Method) -> None:
    """Raises ValueError unless the method accepts the types of all matrices. A quantising method
    accepts dense types, another method only its own form."""
    accepted = [name for name, form in forms().items() if form == method.form]
    if not method.quantised:
        accepted = list(DENSE)
    for source in layer.matrices.values():
        if source.dtype not in accepted:
            raise ValueError(
                f"{source.some} has type {source.dtype}, which only method {ANY_TYPE} reads; method"
                f" {method.name} was requested, which reads {' or '.join(accepted) or 'no type'}"
                " from GGUF files"
            )


def _read(layer: GgufLayer, experts: int, expert: int, files: OpenFiles) -> dict[str, Matrix]:
    """Reads the fields of one expert."""
    result: dict[str, Matrix] = {}
    for matrix, source in layer.matrices.items():
        info, *part = source.piece(expert, experts)
        rows = files.read_part(info, *part).view(-1, row_bytes(info))
        result[matrix] = to_matrix(info, rows, f"{info}: expert {expert}, {matrix}")
    for matrix, source in layer.biases.items():
        info, *part = source.piece(expert, experts)
        result[f"{matrix}_bias"] = to_dense(info, files.read_part(info, *part)).float()
    return result
