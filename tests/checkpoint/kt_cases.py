"""The input from which kt-kernel made the files in data/. Numpy only, for kt-kernel's Python."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MATRICES = ("gate", "up", "down")


@dataclass(frozen=True)
class Case:
    """A layer that kt-kernel quantised with its weights split over `parts` NUMA nodes."""

    bits: int
    parts: int
    experts: int
    hidden: int
    inter: int
    layer: int = 0

    @property
    def name(self) -> str:
        return f"int{self.bits}-{self.parts}-{self.hidden}x{self.inter}"

    def shape(self, matrix: str) -> tuple[int, int]:
        return (self.hidden, self.inter) if matrix == "down" else (self.inter, self.hidden)


# Committed as a whole.
SMALL = (
    Case(8, 1, 2, 128, 64),
    Case(8, 2, 2, 64, 128, layer=3),
    Case(4, 1, 2, 128, 128),
    Case(4, 2, 1, 128, 256, layer=3),
)
# Committed as the folder of .kt files that the converter merges.
FOLDER = Case(8, 2, 1, 64, 128, layer=1)
# Committed as digests. Has several of kt-kernel's blocks of rows and of columns (3584), a smaller
# last block, and three parts.
LARGE = (
    Case(8, 1, 1, 7360, 128),
    Case(8, 3, 1, 192, 3648),
    Case(8, 2, 1, 128, 7424),
    Case(4, 1, 1, 7296, 256),
    Case(4, 3, 1, 384, 1152),
    Case(4, 2, 1, 256, 7424),
)


def source(case: Case, expert: int, matrix: str) -> np.ndarray:
    """The weights, as float32 holding bf16 values, about normal. Some rows are special: zeros, one
    outlier, equal magnitudes, ties when rounding to 4 bits."""
    rows, columns = case.shape(matrix)
    seed = 1000 * expert + 10 * MATRICES.index(matrix) + case.bits
    random = np.random.RandomState(seed)  # its streams are frozen
    sums = random.randint(-64, 64, (4, rows, columns)).sum(0)
    weights = bf16(sums.astype(np.float32) / 4096 * (1 + np.arange(rows)[:, None] % 5))
    weights[1::32] = 0
    weights[2::32] = 2**-9
    weights[2::32, columns // 2 :] *= -1
    weights[3::32] = (np.arange(columns) % 29 - 14) / 2.0
    weights[4::32, 5] = 8
    return weights


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounds to the nearest bf16, ties to even; returns float32."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
