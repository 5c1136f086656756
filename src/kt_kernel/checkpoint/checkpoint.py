"""A checkpoint on disk: opened once, then asked for layers."""

from __future__ import annotations

import errno
import operator
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..experts import ExpertTensors, Matrix
from ..methods import LayerForm
from ..text import ranges
from .families import model_type
from .header import TensorInfo
from .index import Index, read_index, stamp
from .layout import Layout, find_layout, find_packed, layer_tensors, refuse_packed
from .paths import check_path
from .quantization import read_quantization
from .reader import LayerReader, infer_sizes, open_layer


class Checkpoint:
    """The tensors of a Hugging Face checkpoint in safetensors files. Made by `open_checkpoint`.

    Only headers are held; no file stays open. May be used from several threads.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._layers = layer_tensors(index.tensors)
        self._layouts: dict[int, Layout | None] = {}
        self._packed = find_packed(index.tensors)
        self._quantization = read_quantization(index.config, index.config_path)

    @property
    def path(self) -> str:
        return self._index.path

    @property
    def model_type(self) -> str | None:
        """From config.json; None without one."""
        return model_type(self._index.config)

    @property
    def tensors(self) -> MappingProxyType[str, TensorInfo]:
        """Name, file, dtype and shape of every tensor, by name."""
        return MappingProxyType(self._index.tensors)

    def layers(self) -> list[int]:
        """Numbers of the layers that have tensors named like experts, ascending."""
        return sorted(n for n, ts in self._layers.items() if any("experts." in t for t in ts))

    def where(self, layer_idx: int) -> str:
        """What the names of the layer's experts begin with: "model.layers.3.mlp.experts" or, for
        stacked ones, "model.layers.3."."""
        return self._layout(layer_idx).where

    def sizes(self, layer_idx: int) -> tuple[int, int, int]:
        """(num_experts, hidden_size, moe_intermediate_size) as the files have them."""
        return infer_sizes(self._layout(layer_idx), self._quantization)

    def read_experts(
        self,
        layer_idx: int,
        num_experts: int,
        hidden_size: int,
        moe_intermediate_size: int,
        experts: Iterable[int] | None = None,
        method: str | None = None,
    ) -> ExpertTensors:
        """Reads the experts of one layer, in logical order.

        experts: the logical ids wanted (default all); the entries of the others are None and their
        data is not read. method: the weights are given as this method takes them, which for FP8
        checkpoints and methods that quantise by themselves is float32; None: as they are stored.
        Weights are contiguous CPU tensors that stay valid on their own; see `ExpertTensors` for
        shapes.

        Raises ValueError naming file and tensor if experts are missing, too many, of another shape
        or dtype, laid out in a way that is not known, not what the method takes, or with scales
        that are negative or not finite.
        """
        layout, sizes, wanted = self._request(
            layer_idx, num_experts, hidden_size, moe_intermediate_size, experts
        )
        with _Files(self._index) as files:
            reader = open_layer(layout, sizes, files.read, self._quantization, method)
            return reader.read_all(num_experts, wanted)

    @contextmanager
    def each_expert(
        self,
        layer_idx: int,
        num_experts: int,
        hidden_size: int,
        moe_intermediate_size: int,
        experts: Iterable[int] | None = None,
        method: str | None = None,
    ) -> Iterator[ExpertStream]:
        """`read_experts` one by one, so that only one expert's copies need be in memory.

            with checkpoint.each_expert(3, 128, 2048, 768) as experts:
                for expert, tensors in experts: ...

        Gives the logical id, ascending, and a dictionary of the fields of `ExpertTensors`. On
        entry all of the layer has been checked and nothing was read.

        Raises what `read_experts` raises; for all but values of scales, on entry.
        """
        layout, sizes, wanted = self._request(
            layer_idx, num_experts, hidden_size, moe_intermediate_size, experts
        )
        with _Files(self._index) as files:
            reader = open_layer(layout, sizes, files.read, self._quantization, method)
            yield ExpertStream(reader, wanted)

    def _request(
        self, layer_idx: Any, num_experts: Any, hidden: Any, inter: Any, experts: Any
    ) -> tuple[Layout, tuple[int, int, int], list[int]]:
        """Layout, sizes and sorted ids of a call, its arguments checked."""
        layer_idx = _integer("layer_idx", layer_idx, 0)
        num_experts = _integer("num_experts", num_experts, 1)
        hidden = _integer("hidden_size", hidden, 1)
        inter = _integer("moe_intermediate_size", inter, 1)
        if experts is None:
            experts = range(num_experts)
        wanted = sorted({_integer("expert", expert, 0) for expert in experts})
        if wanted and wanted[-1] >= num_experts:
            raise ValueError(f"expert is {wanted[-1]}; expected 0 to {num_experts - 1}")
        return self._layout(layer_idx), (num_experts, hidden, inter), wanted

    def read_tensor(self, name: str) -> torch.Tensor:
        """Any tensor by its name, on the CPU. KeyError if there is none of that name."""
        info = self._index.tensors.get(name)
        if info is None:
            raise KeyError(f"{self.path}: no tensor {name!r}")
        with _Files(self._index) as files:
            return files.read(info)

    def _layout(self, layer_idx: int) -> Layout:
        if self._packed:
            refuse_packed(self._packed)
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
            layers = self.layers()
            have = (
                f"layers with experts: {ranges(layers, ', ')}" if layers else "no layer has experts"
            )
            raise ValueError(f"{self.path}: layer {layer_idx} has no experts; {have}")
        return layout


class ExpertStream:
    """The experts of a layer, read as they are asked for.

    form: of the weights; None if all are dense.
    """

    def __init__(self, reader: LayerReader, wanted: list[int]) -> None:
        self.form: LayerForm | None = reader.form
        self._reader, self._wanted = reader, wanted

    def __iter__(self) -> Iterator[tuple[int, dict[str, Matrix]]]:
        return ((expert, self._reader.read(expert)) for expert in self._wanted)


class _Files:
    """Maps each file at most once during one call."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read(self, info: TensorInfo, first: int | None = None) -> torch.Tensor:
        try:
            file = self._open.get(info.file)
            if file is None:
                # A mapped file that has become shorter would kill the process on access.
                if stamp(info.file) != self._index.stamps[info.file]:
                    raise ValueError(f"{info.file}: changed since the checkpoint was opened")
                file = self._stack.enter_context(safe_open(info.file, framework="pt"))
                self._open[info.file] = file
            tensor = (
                file.get_tensor(info.name) if first is None else file.get_slice(info.name)[first]
            )
        except SafetensorError as error:
            raise ValueError(f"{info}: {error}") from error
        # The format does not align data; code that takes the pointer expects it aligned.
        return tensor.clone() if tensor.data_ptr() % tensor.element_size() else tensor


_opened: dict[str, Checkpoint] = {}
_lock = threading.Lock()


def _renew_lock_after_fork() -> None:  # another thread of the parent may have held it
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock_after_fork)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a safetensors file, an index (*.safetensors.index.json), or a folder (recursive).

    Reads and checks all headers, no tensor data. The result is shared by all callers of the same
    path for as long as nothing there changes.

    Raises FileNotFoundError, PermissionError, or ValueError naming file and tensor: see
    `kt_kernel.checkpoint.index`; TypeError or ValueError for what is no path.
    """
    path = os.path.abspath(check_path("path", path))
    with _lock:
        checkpoint = _opened.get(path)
        if checkpoint is None or checkpoint._index.changed():
            try:
                checkpoint = _opened[path] = Checkpoint(read_index(path))
            except NotADirectoryError as error:  # a file where the path has a folder
                raise FileNotFoundError(errno.ENOENT, error.strerror, path) from None
        return checkpoint


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


def _integer(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; expected an integer") from None
    if number < least:
        raise ValueError(f"{name} is {number}; expected at least {least}")
    return number
