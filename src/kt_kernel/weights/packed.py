"""Weight matrices in the layout of the compiled core, as in packed directories."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..runtime.variant import native
from .formats import WeightForm


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """One weight matrix W [N, K], packed (kernels/include/kt/format.h).

    shape: (N, K). tiles: contiguous uint8 array of `packed_shape`; may be a read-only mapping of a
    file.
    """

    form: WeightForm
    shape: tuple[int, int]
    tiles: np.ndarray

    @property
    def nbytes(self) -> int:
        return self.tiles.nbytes


def packed_shape(form: WeightForm, rows: int, columns: int) -> tuple[int, int]:
    """(tiles, bytes of one tile) of a packed matrix [rows, columns]."""
    return native().packed_shape(*form.core, rows, columns)
