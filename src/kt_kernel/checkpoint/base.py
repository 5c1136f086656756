"""The interface of all checkpoints, independent of their file format."""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from types import MappingProxyType
from typing import Any

import torch

from ..runtime.text import ranges
from ..weights.expert_tensors import ExpertTensors, Matrix
from ..weights.formats import LayerForm
from ..weights.loading import bytes_of
from .ahead import read_ahead
from .fingerprint import fingerprint
from .header import TensorInfo
from .index import Index
from .open_files import Pieces
from .quantization import Quantization
from .reader import LayerReader
from .stored import Stored

# num_experts, hidden_size, moe_intermediate_size
Sizes = tuple[int, int, int]


class Checkpoint(ABC):
    """A checkpoint on disk, opened once and read layer by layer. Created by `open_checkpoint`.

    Holds only headers and keeps no file open. Thread-safe.
    """

    def __init__(self, index: Index) -> None:
        self._index = index

    @property
    def path(self) -> str:
        return self._index.path

    @property
    @abstractmethod
    def model_type(self) -> str | None:
        """model_type of config.json, or None."""

    @property
    def quantization(self) -> Quantization:
        """The quantisation settings of config.json. Empty for formats other than safetensors."""
        return Quantization()

    @property
    def tensors(self) -> MappingProxyType[str, TensorInfo]:
        """File, dtype and shape of every tensor, by name."""
        return MappingProxyType(self._index.tensors)

    @property
    def faults(self) -> tuple[str, ...]:
        """What is wrong with single tensors that may not be needed: a tensor in two files, or one
        that an index lists but no file has."""
        return tuple(self._index.faults.values())

    @functools.cached_property
    def fingerprint(self) -> str:
        """See `kt_kernel.checkpoint.fingerprint`. Computed once."""
        return fingerprint(self)

    def changed(self, folders: bool = True) -> str | None:
        """The first file (or folder, with `folders`) that has changed since it was read."""
        return self._index.changed(folders)

    @abstractmethod
    def layers(self) -> list[int]:
        """Numbers of the layers that have expert tensors, ascending. Raises ValueError naming a
        tensor if all are of a format that is known and not read."""

    @abstractmethod
    def where(self, layer_idx: int) -> str:
        """The common prefix of the names of the layer's experts: "model.layers.3.mlp.experts", or
        "model.layers.3." if they are stacked, or "blk.3." in GGUF files."""

    @abstractmethod
    def sizes(self, layer_idx: int) -> Sizes:
        """(num_experts, hidden_size, moe_intermediate_size) according to the files."""

    @abstractmethod
    def stored(self, layer_idx: int) -> Stored:
        """The format in which the layer's experts are stored.

        Raises ValueError naming file and tensor if the layer has no experts or an unknown format.
        """

    @functools.cached_property
    def unconvertible(self) -> str:
        """The format of experts that can only be computed as they are stored, because no other
        method reads them; "" if there are none. Layers in an unknown format do not count."""
        for layer in self.layers():
            try:
                stored = self.stored(layer)
            except ValueError:
                continue
            if not (stored.dense or stored.convertible):
                return stored.title
        return ""

    @functools.cached_property
    def in_activation_order(self) -> bool:
        """Whether quantised columns of experts are in the order of their activations (act-order),
        as far as the headers tell. Layers in an unknown format do not count."""
        for layer in self.layers():
            with suppress(ValueError):
                if self.stored(layer).ordered:
                    return True
        return False

    def read_tensor(self, name: str) -> torch.Tensor:
        """Reads any tensor by name, to the CPU. A quantised GGUF tensor is returned as its blocks,
        uint8 [..., bytes of a row]. Raises KeyError if there is no such tensor, and ValueError
        if it cannot be read."""
        info = self._index.tensors.get(name)
        if info is None:
            raise KeyError(f"{self.path}: no tensor {name!r}")
        self._index.need([info])
        return self._read_tensor(info)

    @abstractmethod
    def _read_tensor(self, info: TensorInfo) -> torch.Tensor:
        """Reads a tensor of the index."""

    @abstractmethod
    def _open_layer(
        self, layer_idx: int, sizes: Sizes, method: str | None
    ) -> AbstractContextManager[tuple[LayerReader, Pieces]]:
        """The reader of a layer that passed all checks, see `read_experts`, and where the files
        have each expert."""

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

        experts: the logical ids to read (default: all). The entries of all others are None, and
        their data is not read.
        method: return the weights in the form that this method accepts. For FP8 checkpoints and
        quantising methods this is float32. None: return them as they are stored.

        Returns contiguous CPU tensors in memory of their own; see `ExpertTensors` for shapes.

        Raises ValueError naming file and tensor if experts are missing, if there are too many, if
        their shape, dtype or layout is wrong, if the method does not accept them, or if a scale is
        not finite, or negative in a format whose scales are not; and OSError naming the file if it
        cannot be read.
        """
        layer_idx, sizes, wanted = _request(
            layer_idx, num_experts, hidden_size, moe_intermediate_size, experts
        )
        with self._open_layer(layer_idx, sizes, method) as (reader, _):
            return reader.read_all(sizes[0], wanted)

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
        """Reads the experts of one layer one by one, so that only a few are in memory at a time.
        The next ones, up to `ahead.AHEAD_BYTES` or one expert, are read while the caller is busy.

            with checkpoint.each_expert(3, 128, 2048, 768) as experts:
                for expert, tensors in experts: ...

        Yields the logical id, ascending, and a dict of the fields of `ExpertTensors`. On entry, the
        whole layer has been checked and no weights have been read.

        Raises what `read_experts` raises, on entry unless the fault is in the values of scales or
        in reading.
        """
        layer_idx, sizes, wanted = _request(
            layer_idx, num_experts, hidden_size, moe_intermediate_size, experts
        )
        with (
            self._open_layer(layer_idx, sizes, method) as (reader, pieces),
            closing(ExpertStream(reader, pieces, wanted)) as stream,
        ):
            yield stream

    def _no_experts(self, layer_idx: int) -> ValueError:
        layers = self.layers()
        have = f"layers with experts: {ranges(layers, ', ')}" if layers else "no layer has experts"
        return ValueError(f"{self.path}: layer {layer_idx} has no experts; {have}")


class ExpertStream:
    """The experts of a layer, read slightly ahead.

    form: the form of the weights, or None if all are dense.
    fields: the fields of `ExpertTensors` that the layer has.
    stored_bytes: bytes in the files of the experts read so far.
    """

    def __init__(self, reader: LayerReader, pieces: Pieces, wanted: list[int]) -> None:
        self.form: LayerForm | None = reader.form
        self.fields = reader.fields
        self.stored_bytes = 0
        self._reader, self._pieces, self._wanted = reader, pieces, wanted
        self._running = read_ahead((), reader.read, bytes_of)

    def __iter__(self) -> Iterator[tuple[int, dict[str, Matrix]]]:
        self._running = read_ahead(self._announced(), self._read, bytes_of)
        return self._running

    def _announced(self) -> Iterator[int]:
        """The experts, each while the system already reads the one after it."""
        for place, expert in enumerate(self._wanted):
            for near in self._wanted[0 if place == 0 else place + 1 : place + 2]:
                self._pieces.expect(near)
            yield expert

    def _read(self, expert: int) -> dict[str, Matrix]:
        tensors = self._reader.read(expert)
        self.stored_bytes += self._pieces.bytes_of(expert)
        return tensors

    def close(self) -> None:
        """Stops reading. Experts already returned stay valid."""
        self._running.close()


def _request(
    layer_idx: Any, num_experts: Any, hidden: Any, inter: Any, experts: Any
) -> tuple[int, Sizes, list[int]]:
    """Checks the arguments of a call. Returns the layer, its sizes, and the sorted ids."""
    layer_idx = _integer("layer_idx", layer_idx, 0)
    num_experts = _integer("num_experts", num_experts, 1)
    hidden = _integer("hidden_size", hidden, 1)
    inter = _integer("moe_intermediate_size", inter, 1)
    if experts is None:
        experts = range(num_experts)
    wanted = sorted({_integer("expert", expert, 0) for expert in experts})
    if wanted and wanted[-1] >= num_experts:
        raise ValueError(f"expert is {wanted[-1]}; expected 0 to {num_experts - 1}")
    return layer_idx, (num_experts, hidden, inter), wanted


def _integer(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; expected an integer") from None
    if number < least:
        raise ValueError(f"{name} is {number}; expected at least {least}")
    return number
