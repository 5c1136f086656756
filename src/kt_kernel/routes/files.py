"""The safetensors files of this room: kind, version and model in the metadata, checked tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..runtime.files import write_output
from .model import RoutedModel

VERSION = "1"


@dataclass(frozen=True)
class Contents:
    """A file's tensors by name, and its model (None if the kind needs none and it names none)."""

    path: str
    tensors: Mapping[str, np.ndarray]
    model: RoutedModel | None

    def need_model(self) -> RoutedModel:
        """The model. ValueError naming the file if there is none."""
        if self.model is None:
            raise ValueError(f"{self.path}: its metadata names no model")
        return self.model


def write(
    path: str,
    kind: str,
    tensors: Mapping[str, np.ndarray],
    model: RoutedModel | None,
    *,
    again: bool = True,
) -> None:
    """Writes the file atomically. again: see `write_output`. Raises OSError."""
    metadata = {"kind": kind, "version": VERSION}
    if model is not None:
        metadata["model"] = model.to_json()
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    write_output(path, save(contiguous, metadata), again=again)


def read(path: str, kind: str, shapes: Mapping[str, tuple[Any, str]]) -> Contents:
    """Reads and checks a file.

    shapes: dtype and dimensions of each tensor, such as {"counts": (np.float64, "LE")}. A letter
    stands for a size, which must be the same everywhere and at least 1; "T" may be 0.

    Raises OSError, or ValueError naming the file if it is of another kind.
    """
    _need_readable(path)
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, TypeError) as error:  # TypeError: a dtype that numpy lacks
        raise ValueError(f"{path}: not a safetensors file with {kind}: {error}") from None
    if metadata.get("kind") != kind or metadata.get("version") != VERSION:
        have = f"{metadata.get('kind', 'no kind')}, version {metadata.get('version', 'none')}"
        raise ValueError(f"{path}: its metadata says {have}; expected {kind}, version {VERSION}")
    sizes: dict[str, int] = {}
    for name, (dtype, letters) in shapes.items():
        tensor = found.get(name)
        if tensor is None:
            raise ValueError(f"{path}: no tensor {name!r}")
        if tensor.dtype != dtype or tensor.ndim != len(letters):
            raise ValueError(
                f"{path}: {name} is {tensor.dtype} {list(tensor.shape)}; expected "
                f"{np.dtype(dtype)} [{', '.join(letters)}]"
            )
        for letter, size in zip(letters, tensor.shape, strict=True):
            if sizes.setdefault(letter, size) != size or (size == 0 and letter != "T"):
                raise ValueError(
                    f"{path}: {name} has shape {list(tensor.shape)}, but {letter} is "
                    f"{sizes[letter]} and must be the same everywhere, and at least 1"
                )
    model = None
    if "model" in metadata:
        try:
            model = RoutedModel.from_json(metadata["model"])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    return Contents(path, found, model)


def _need_readable(path: str) -> None:
    """Raises an OSError that names the path, as safe_open does not."""
    with open(path, "rb"):
        pass


def kind_of(path: str) -> str | None:
    """The kind in the metadata of a file; None if it has none. Raises OSError."""
    _need_readable(path)
    try:
        with safe_open(path, "np") as file:
            return (file.metadata() or {}).get("kind")
    except SafetensorError:
        return None


def check_layers(layers: np.ndarray, place: str) -> tuple[int, ...]:
    """Layer numbers [L] as a tuple. ValueError unless they ascend from 0 on."""
    numbers = tuple(int(layer) for layer in layers)
    if list(numbers) != sorted(set(numbers)) or numbers[0] < 0:
        raise ValueError(f"{place}: layers {list(numbers)} must ascend from 0 on")
    return numbers
