"""How often each expert was selected: the file that a server records and that placement reads.

A safetensors file. Metadata: "kind" = "kt-expert-statistics", "version" = "1", "model" = the JSON
of `RoutedModel`. Tensors:

- layers, int64 [L]: numbers of the MoE layers, ascending.
- counts, float64 [L, E]: tokens that selected the expert. Whole numbers, unless files were merged
  with a decay.
- tokens, float64 [L]: tokens seen by the layer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import files
from .model import RoutedModel

KIND = "kt-expert-statistics"
_SHAPES = {"layers": (np.int64, "L"), "counts": (np.float64, "LE"), "tokens": (np.float64, "L")}


@dataclass(frozen=True, eq=False)
class ExpertStatistics:
    """Counts of one model. layers: [L], ascending; counts: float64 [L, E]; tokens: float64 [L]."""

    model: RoutedModel
    layers: tuple[int, ...]
    counts: np.ndarray
    tokens: np.ndarray

    @property
    def frequencies(self) -> np.ndarray:
        """float64 [L, E]: the share of the layer's tokens that selected the expert; 0 for a layer
        without tokens."""
        return self.counts / np.maximum(self.tokens, 1e-300)[:, None]

    def save(self, path: str | os.PathLike[str], *, again: bool = True) -> None:
        """Writes the file atomically. again: see `write_output`. Raises OSError."""
        tensors = {
            "layers": np.array(self.layers, np.int64),
            "counts": self.counts.astype(np.float64),
            "tokens": self.tokens.astype(np.float64),
        }
        files.write(os.fspath(path), KIND, tensors, self.model, again=again)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ExpertStatistics:
        """Raises OSError, or ValueError naming the file if it is not such a file."""
        place = os.fspath(path)
        contents = files.read(place, KIND, _SHAPES)
        model = contents.need_model()
        counts, tokens = contents.tensors["counts"], contents.tensors["tokens"]
        if counts.shape[1] != model.num_experts:
            raise ValueError(
                f"{place}: counts of {counts.shape[1]} experts, but the model has "
                f"{model.num_experts}"
            )
        for name, values in (("counts", counts), ("tokens", tokens)):
            if not (np.isfinite(values) & (values >= 0)).all():
                raise ValueError(f"{place}: {name} must be finite and at least 0")
        layers = files.check_layers(contents.tensors["layers"], place)
        return cls(model, layers, counts, tokens)


def merge(
    statistics: Sequence[ExpertStatistics], names: Sequence[str], decay: float = 1.0
) -> ExpertStatistics:
    """The sum of statistics of one model; at least one.

    names: of each, for messages. decay: factor above 0 and up to 1 for every file that follows, so
    that old files, which come first, count less. A layer may be missing from some of them.

    ValueError for another decay, or if one belongs to another model.
    """
    if not 0 < decay <= 1:
        raise ValueError(f"decay {decay}: expected more than 0 and at most 1")
    first = statistics[0]
    for one, name in zip(statistics, names, strict=True):
        one.model.need_same(first.model, name)
    layers = tuple(sorted({layer for one in statistics for layer in one.layers}))
    row = {layer: i for i, layer in enumerate(layers)}
    counts = np.zeros((len(layers), first.model.num_experts))
    tokens = np.zeros(len(layers))
    for age, one in zip(range(len(statistics) - 1, -1, -1), statistics, strict=True):
        rows = [row[layer] for layer in one.layers]
        counts[rows] += one.counts * decay**age
        tokens[rows] += one.tokens * decay**age
    return ExpertStatistics(first.model, layers, counts, tokens)
