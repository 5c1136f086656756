"""One layer's file in a packed directory: a safetensors file. The layer's description determines
its header completely, so a reader can compare it instead of trusting it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..expert_tensors import BIASES, MATRICES, matrix_shapes
from ..formats import LayerForm
from ..packed import packed_shape

MAX_LAYER = 99999  # so that file names sort by layer
METADATA_KEY = "kt_packed"
_TENSOR = re.compile(rf"layers\.([0-9]{{1,5}})\.experts\.({'|'.join(MATRICES + BIASES)})")
_ALIGNMENT = 64  # of the data, so that the tiles of a mapped file can be copied


@dataclass(frozen=True)
class LayerSpec:
    """The content of one layer's file.

    biases: the layer's `BIASES`. ValueError for a layer above `MAX_LAYER`.
    """

    layer: int
    num_experts: int
    hidden_size: int
    moe_intermediate_size: int
    form: LayerForm
    biases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_layer(self.layer)

    @property
    def file(self) -> str:
        return layer_file(self.layer)

    def matrix_shape(self, matrix: int) -> tuple[int, int]:
        """(N, K) of gate, up (0, 1) or down (2)."""
        shapes = matrix_shapes(self.hidden_size, self.moe_intermediate_size)
        return shapes[MATRICES[matrix]]

    def expert_shape(self, matrix: int) -> tuple[int, int]:
        """(tiles, tile bytes) of one expert's matrix."""
        return self._expert_shapes[matrix]

    @cached_property
    def _expert_shapes(self) -> list[tuple[int, int]]:
        return [packed_shape(form, *self.matrix_shape(m)) for m, form in enumerate(self.form)]

    def bias_width(self, name: str) -> int:
        return self.hidden_size if name == "down_bias" else self.moe_intermediate_size

    @cached_property
    def tensors(self) -> dict[str, dict[str, Any]]:
        """The entries of the safetensors header, in the order of the data."""
        entries: dict[str, dict[str, Any]] = {}
        begin = 0
        parts = [
            (name, "U8", 1, [self.num_experts, *self.expert_shape(m)])
            for m, name in enumerate(MATRICES)
        ] + [(name, "F32", 4, [self.num_experts, self.bias_width(name)]) for name in self.biases]
        for name, dtype, size, shape in parts:
            end = begin + size * math.prod(shape)
            entries[self.tensor(name)] = {
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [begin, end],
            }
            begin = end
        return entries

    def tensor(self, name: str) -> str:
        """Full name of one of `MATRICES` or `BIASES`."""
        return f"layers.{self.layer}.experts.{name}"

    @property
    def data_bytes(self) -> int:
        return max(entry["data_offsets"][1] for entry in self.tensors.values())

    def header(self, model: dict[str, Any]) -> bytes:
        """Everything before the data. `model`: the manifest's entries for all layers."""
        about = model | {
            "layer": self.layer,
            "moe_intermediate_size": self.moe_intermediate_size,  # the tiles' number rounds it up
            "forms": form_entries(self.form),
        }
        text = json.dumps(
            {"__metadata__": {METADATA_KEY: json.dumps(about, sort_keys=True)}, **self.tensors},
            separators=(",", ":"),
        ).encode()
        text += b" " * (-(8 + len(text)) % _ALIGNMENT)  # the format allows spaces at the end
        return len(text).to_bytes(8, "little") + text


def check_layer(layer: int) -> None:
    """ValueError for a layer number that is too large."""
    if layer > MAX_LAYER:
        raise ValueError(f"layer {layer}: packed directories have layers 0 to {MAX_LAYER}")


def layer_file(layer: int) -> str:
    """Name of a layer's file; the names sort as the layers do."""
    return f"layer-{layer:05d}.safetensors"


def layer_of_tensor(name: str) -> int | None:
    """The layer in the name of a tensor of a layer's file; None for other names."""
    match = _TENSOR.fullmatch(name)
    return int(match[1]) if match else None


def form_entries(form: LayerForm) -> dict[str, dict[str, int]]:
    """A layer's form in JSON: the numbers of the compiled core, which the layout version pins."""
    return {
        name: {"format": f.format.id, "group_size": f.group_size, "scale_type": f.scale_type}
        for name, f in zip(MATRICES, form, strict=True)
    }
