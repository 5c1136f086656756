"""Which experts each token selected, token by token: the file that a server records.

A safetensors file. Metadata: "kind" = "kt-expert-routes", "version" = "1", "model" = the JSON of
`RoutedModel`. Tensors:

- layers, int64 [L]: numbers of the MoE layers, ascending.
- routes, int16 [T, L, K]: ids of the experts, in the router's order; -1 for none.
- passes, int64 [T]: number of the forward pass that computed the token, ascending from any number.
  Tokens of a prompt share passes; with one request, each decoded token has its own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np

from . import files
from .model import RoutedModel
from .statistics import ExpertStatistics

KIND = "kt-expert-routes"
_SHAPES = {"layers": (np.int64, "L"), "routes": (np.int16, "TLK"), "passes": (np.int64, "T")}


@dataclass(frozen=True, eq=False)
class RouteRecord:
    """The routes of T tokens of one model. layers: [L]; routes: int16 [T, L, K]; passes: int64
    [T]."""

    model: RoutedModel
    layers: tuple[int, ...]
    routes: np.ndarray
    passes: np.ndarray

    @property
    def decoded(self) -> RouteRecord:
        """The tokens that had a pass of their own: with one request at a time, the decoded ones."""
        _, place, size = np.unique(self.passes, return_inverse=True, return_counts=True)
        alone = size[place] == 1
        return replace(self, routes=self.routes[alone], passes=self.passes[alone])

    def statistics(self) -> ExpertStatistics:
        """How often each expert was selected."""
        experts = self.model.num_experts
        tokens, layers, _ = self.routes.shape
        flat = self.routes.astype(np.int64) + (np.arange(layers) * experts)[None, :, None]
        counts = np.bincount(flat[self.routes >= 0], minlength=layers * experts)
        return ExpertStatistics(
            self.model,
            self.layers,
            counts.reshape(layers, experts).astype(np.float64),
            np.full(layers, float(tokens)),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file atomically. Raises OSError."""
        tensors: dict[str, np.ndarray] = {
            "layers": np.array(self.layers, np.int64),
            "routes": self.routes.astype(np.int16),
            "passes": self.passes.astype(np.int64),
        }
        files.write(os.fspath(path), KIND, tensors, self.model)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RouteRecord:
        """Raises OSError, or ValueError naming the file if it is not such a file."""
        place = os.fspath(path)
        contents = files.read(place, KIND, _SHAPES)
        model = contents.need_model()
        routes, passes = contents.tensors["routes"], contents.tensors["passes"]
        experts = model.num_experts
        if ((routes < -1) | (routes >= experts)).any():
            raise ValueError(f"{place}: routes must be -1 to {experts - 1}")
        if (np.diff(passes) < 0).any():
            raise ValueError(f"{place}: passes must ascend")
        layers = files.check_layers(contents.tensors["layers"], place)
        return cls(model, layers, routes, passes)
