"""Checkpoints in safetensors files, with Hugging Face's tensor names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from ...weights.methods import GGUF_METHOD, get_method
from ..base import Checkpoint, Sizes
from ..header import TensorInfo
from ..index import Index
from ..open_files import Piece, Pieces
from ..quantization import Quantization, read_quantization
from ..reader import LayerReader, Wanted, infer_sizes, open_layer
from ..stored import Stored, stored_in
from .families import model_type
from .files import Files
from .foreign import refuse_mlx
from .layout import Layout, PerExpert, find_layout, holds_experts, layer_tensors, tensors_of


class HuggingFaceCheckpoint(Checkpoint):
    """A Hugging Face checkpoint in safetensors files."""

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self._layers = layer_tensors(index.tensors)
        self._layouts: dict[int, Layout | None] = {}
        self._quantization = read_quantization(index.config, index.config_path)

    @property
    def model_type(self) -> str | None:
        return model_type(self._index.config)

    @property
    def quantization(self) -> Quantization:
        return self._quantization

    def layers(self) -> list[int]:
        found = sorted(n for n, tensors in self._layers.items() if holds_experts(tensors))
        if not found:
            refuse_mlx(self._index.tensors.values())
        return found

    def where(self, layer_idx: int) -> str:
        return self._layout(layer_idx).where

    def sizes(self, layer_idx: int) -> Sizes:
        return infer_sizes(self._layout(layer_idx))

    def stored(self, layer_idx: int) -> Stored:
        return stored_in(self._layout(layer_idx), self._quantization)

    def _read_tensor(self, info: TensorInfo) -> torch.Tensor:
        with Files(self._index) as files:
            return files.read(info)

    @contextmanager
    def _open_layer(
        self, layer_idx: int, sizes: Sizes, method: str | None
    ) -> Iterator[tuple[LayerReader, Pieces]]:
        chosen = None if method is None else get_method(method)
        if chosen is not None and chosen.name == GGUF_METHOD:
            raise ValueError(
                f"{self.path}: this checkpoint is in safetensors files; method {method} reads GGUF"
                " files"
            )
        layout = self._layout(layer_idx)
        with Files(self._index) as files:
            wanted = Wanted(chosen, lambda: self._keeps_a_layer(method))
            reader = open_layer(layout, sizes, files.read, self._quantization, wanted)
            yield reader, Pieces(files, lambda expert: _pieces(layout, sizes[0], expert))

    def _keeps_a_layer(self, method: str | None) -> bool:
        """Whether the method keeps quantised weights of any layer. Layers that cannot be read are
        not counted."""
        for layer in self.layers():
            with suppress(ValueError):
                if method in self.stored(layer).each:
                    return True
        return False

    def _layout(self, layer_idx: int) -> Layout:
        if layer_idx not in self._layouts:
            self._layouts[layer_idx] = self._find_layout(layer_idx)
        layout = self._layouts[layer_idx]
        if layout is None:
            raise self._no_experts(layer_idx)
        return layout

    def _find_layout(self, layer_idx: int) -> Layout | None:
        tensors = self._layers.get(layer_idx, {})
        has_config = self._index.config is not None
        try:
            layout = find_layout(self.path, layer_idx, tensors, self.model_type, has_config)
        except ValueError as error:
            raise self._index.explain(error) from None
        if layout is not None:
            self._index.need(tensors_of(layout))
        return layout


def _pieces(layout: Layout, experts: int, expert: int) -> Iterator[Piece]:
    """Where the files have one expert."""
    if isinstance(layout, PerExpert):
        yield from ((info, 0, 1) for info in tensors_of(layout, expert))
        return
    for info in tensors_of(layout):
        if info.shape[:1] == (experts,):  # not one number for all
            yield info, expert, experts
