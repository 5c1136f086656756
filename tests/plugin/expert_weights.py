"""Shared by the checkpoints of experts: their sizes, and a description of each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))  # has the makers of weights

HIDDEN, INTERMEDIATE = 256, 256  # multiples of the largest block, 256 columns
SPREAD = HIDDEN**-0.5  # about the standard deviation of the weights
MATRICES = {
    "gate": (INTERMEDIATE, HIDDEN),
    "up": (INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}

# Expert weights [layers][experts][gate, up, down], float64.
Weights = list[list[tuple[torch.Tensor, ...]]]


@dataclass(frozen=True)
class Source:
    """method: the --kt-method. write: makes the checkpoint at a new path and returns the values of
    its weights."""

    method: str
    write: Callable[[Path], Weights]


def bf16_matrix(rows: int, columns: int) -> torch.Tensor:
    return (SPREAD * torch.randn(rows, columns)).bfloat16()
