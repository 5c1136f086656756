"""The common form of expert weights: every reader returns it, and packing accepts it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .packed import PackedMatrix
from .quantised import QuantisedMatrix

Matrix = torch.Tensor | QuantisedMatrix | PackedMatrix

#: Parts of an expert, by name and in the order of the compiled core.
MATRICES = ("gate", "up", "down")
BIASES = ("gate_bias", "up_bias", "down_bias")


def matrix_shapes(hidden: int, inter: int) -> dict[str, tuple[int, int]]:
    """(N, K) of each of `MATRICES`."""
    return {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}


@dataclass
class ExpertTensors:
    """Weights of the experts of one MoE layer, one list entry per expert, in logical order.

    gate, up: [I, H]; down: [H, I]. Contiguous CPU tensors, bfloat16, float16 or float32; or, from
    quantised checkpoints, a QuantisedMatrix each; or, from packed directories, a PackedMatrix each.
    All gates have the same dtype or form, and so have all ups and all downs; the three differ only
    in checkpoints that mix them. An entry is None if that expert was not requested; all gates are
    None if the experts have none. Biases are float32, [I], [I] and [H]; the lists are None for
    models without biases.

    Entries may share memory with other tensors: treat them as read-only.
    """

    gate: list[Matrix | None]
    up: list[Matrix | None]
    down: list[Matrix | None]
    gate_bias: list[torch.Tensor | None] | None = None
    up_bias: list[torch.Tensor | None] | None = None
    down_bias: list[torch.Tensor | None] | None = None

    @property
    def num_experts(self) -> int:
        return len(self.up)
