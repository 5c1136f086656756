"""A file that says which experts of each layer are hot.

A safetensors file. Metadata: "kind" = "kt-gpu-experts-mask", "version" = "1"; optionally "model",
the JSON of `RoutedModel`. Tensors: layers, int64 [L], numbers of the MoE layers, ascending; hot,
bool [L, E].
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from . import files
from .model import RoutedModel

KIND = "kt-gpu-experts-mask"
_SHAPES = {"layers": (np.int64, "L"), "hot": (np.bool_, "LE")}


@dataclass(frozen=True, eq=False)
class ExpertMasks:
    """layers: [L], ascending; hot: bool [L, E]; model: None if the file names none."""

    layers: tuple[int, ...]
    hot: np.ndarray
    model: RoutedModel | None = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file atomically. Raises OSError."""
        tensors = {"layers": np.array(self.layers, np.int64), "hot": self.hot}
        files.write(os.fspath(path), KIND, tensors, self.model)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ExpertMasks:
        """Raises OSError, or ValueError naming the file if it is not such a file."""
        place = os.fspath(path)
        contents = files.read(place, KIND, _SHAPES)
        layers = files.check_layers(contents.tensors["layers"], place)
        return cls(layers, contents.tensors["hot"], contents.model)
