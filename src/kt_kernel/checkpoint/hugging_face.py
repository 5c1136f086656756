"""A checkpoint in safetensors files, named as Hugging Face's models name their tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..methods import get_method
from .ahead import will_need
from .base import Checkpoint, Sizes
from .families import model_type
from .header import TensorInfo
from .index import Index, stamp
from .layout import Layout, PerExpert, find_layout, holds_experts, layer_tensors
from .quantization import read_quantization
from .reader import LayerReader, infer_sizes, open_layer


class HuggingFaceCheckpoint(Checkpoint):
    """The tensors of a Hugging Face checkpoint in safetensors files."""

    def __init__(self, index: Index) -> None:
        super().__init__(index)
        self._layers = layer_tensors(index.tensors)
        self._layouts: dict[int, Layout | None] = {}
        self._quantization = read_quantization(index.config, index.config_path)

    @property
    def model_type(self) -> str | None:
        return model_type(self._index.config)

    def layers(self) -> list[int]:
        return sorted(n for n, tensors in self._layers.items() if holds_experts(tensors))

    def where(self, layer_idx: int) -> str:
        return self._layout(layer_idx).where

    def sizes(self, layer_idx: int) -> Sizes:
        return infer_sizes(self._layout(layer_idx), self._quantization)

    def read_tensor(self, name: str) -> torch.Tensor:
        info = self._index.tensors.get(name)
        if info is None:
            raise KeyError(f"{self.path}: no tensor {name!r}")
        with Files(self._index) as files:
            return files.read(info)

    @contextmanager
    def _open_layer(
        self, layer_idx: int, sizes: Sizes, method: str | None
    ) -> Iterator[LayerReader]:
        if method is not None and get_method(method).mixed:
            raise ValueError(
                f"{self.path}: a checkpoint in safetensors files; method {method} takes GGUF files"
            )
        layout = self._layout(layer_idx)
        with Files(self._index) as files:
            reader = open_layer(layout, sizes, files.read, self._quantization, method)
            yield replace(reader, size=lambda expert: _stored_bytes(layout, sizes[0], expert))

    def _layout(self, layer_idx: int) -> Layout:
        if layer_idx not in self._layouts:
            self._layouts[layer_idx] = find_layout(
                self.path,
                layer_idx,
                self._layers.get(layer_idx, {}),
                self.model_type,
                self._index.config is not None,
            )
        layout = self._layouts[layer_idx]
        if layout is None:
            raise self._no_experts(layer_idx)
        return layout


def _stored_bytes(layout: Layout, experts: int, expert: int) -> int:
    """Bytes that the files have of one of the experts."""
    if isinstance(layout, PerExpert):
        parts = (info for parts in layout.experts[expert].values() for info in parts.values())
        return sum(info.end - info.begin for info in parts)
    return sum(info.end - info.begin for info in layout.tensors.values()) // experts


class Files:
    """Maps each file at most once during one call.

    A mapped file that has become shorter kills the process on access, so each read looks first
    whether its file is as it was; what is in memory by then may still be cut off afterwards.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._stack = ExitStack()
        self._open: dict[str, tuple[int, Any]] = {}  # file: descriptor, map

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, info: TensorInfo, first: int | None = None) -> torch.Tensor:
        try:
            file = self._file(info.file)
            tensor = (
                file.get_tensor(info.name) if first is None else file.get_slice(info.name)[first]
            )
        except SafetensorError as error:
            raise ValueError(f"{info}: {error}") from error
        will_need(tensor)
        # The format does not align data; code that takes the pointer expects it aligned.
        return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor

    def check(self, path: str, descriptor: int | None = None) -> None:
        """ValueError if a file, open as `descriptor` or by its name, was changed."""
        if stamp(path if descriptor is None else descriptor) != self._index.stamps[path]:
            raise ValueError(f"{path}: changed since the checkpoint was opened")

    def _file(self, path: str) -> Any:
        descriptor, file = self._open.get(path, (None, None))
        if descriptor is None:  # held beside the map, since another file may come to have the name
            descriptor = os.open(path, os.O_RDONLY)
            self._stack.callback(os.close, descriptor)
        self.check(path, descriptor)
        if file is None:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self._open[path] = descriptor, file
        return file
