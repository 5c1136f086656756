"""kt-kernel's quantisation and byte order, element by element, independent of the reader.

`test_kt_packed.py` compares it with files written by kt-kernel's wheel.
"""

from __future__ import annotations

import numpy as np
from kt_cases import MATRICES, Case, source

_COLUMN_BLOCK = 3584


def quantise(weights: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes [N, K] and scale [N] as stored. An INT4 code means 16 times its scale."""
    largest = np.abs(weights).max(1)
    if bits == 8:  # its compiler replaces the division by a product
        scale = largest * (np.float32(1) / np.float32(127))
    else:
        scale = (largest / np.float64(112)).astype(np.float32)
    factor = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
    codes = np.rint(weights * factor[:, None]).astype(np.int32)
    if bits == 4:
        codes = np.sign(codes) * ((np.abs(codes) + 8) // 16)
    return codes, scale


def to_bytes(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [N, K] in kt-kernel's order."""
    rows, columns = codes.shape
    step, row_block = (64, 64) if bits == 8 else (128, 128)
    n, k = np.arange(rows)[:, None], np.arange(columns)[None, :]
    n0, k0 = n - n % row_block, k - k % _COLUMN_BLOCK
    height = np.minimum(row_block, rows - n0)
    width = np.minimum(_COLUMN_BLOCK, columns - k0)
    tile = n0 * columns + k0 * height + (n % row_block) // 32 * 32 * width
    tile = tile + (k - k0) // step * step * 32
    column = (k - k0) % step
    place = n % 32 // 16 * 1024 + column % 64 // 4 * 64 + n % 16 * 4 + column % 4
    if bits == 8:
        out = np.zeros(rows * columns, np.int8)
        out[tile + place] = codes
        return out
    out = np.zeros(rows * columns // 2, np.uint8)
    shift = np.broadcast_to(column // 64 * 4, codes.shape)
    np.bitwise_or.at(
        out, tile // 2 + place, (codes & 15).astype(np.uint8) << shift.astype(np.uint8)
    )
    return out.view(np.int8)


def tensors_of(case: Case) -> dict[str, np.ndarray]:
    """The tensors that kt-kernel's converter writes for a layer."""
    tensors = {}
    for expert in range(case.experts):
        for matrix in MATRICES:
            whole = source(case, expert, matrix)
            for part, weights in enumerate(np.split(whole, case.parts, int(matrix == "down"))):
                codes, scale = quantise(weights, case.bits)
                name = f"blk.{case.layer}.ffn_{matrix}_exps.{expert}.numa.{part}"
                tensors[f"{name}.weight"] = to_bytes(codes, case.bits)
                tensors[f"{name}.scale"] = scale
    return tensors
