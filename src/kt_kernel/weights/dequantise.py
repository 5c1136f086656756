"""The values of quantised matrices in float32, for methods that quantise them anew.

With NumPy, on one thread: other threads are packing the experts before.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from .formats import (
    BLOCK_SIZE,
    FP8_BLOCK,
    FP8_ROW,
    INT4_ROW,
    INT8_ROW,
    MXFP4,
    MXFP8,
    NVFP4,
    Q8_0,
)
from .quantised import QuantisedMatrix

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantise(matrix: QuantisedMatrix) -> torch.Tensor:
    """W, float32 [N, K]: the products of codes and scales, rounded once. Products beyond float32
    are infinite, which packing refuses with the row's number."""
    with np.errstate(over="ignore"):
        weights = _values(matrix)
    if matrix.order is None:
        return torch.from_numpy(weights)
    values = np.empty_like(weights)
    values[:, matrix.order.numpy()] = weights
    return torch.from_numpy(values)


def _values(matrix: QuantisedMatrix) -> np.ndarray:
    if matrix.format == Q8_0:
        blocks = matrix.codes.numpy().reshape(len(matrix.codes), -1, 34)
        scale = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
        return (blocks[..., 2:].view(np.int8) * scale).reshape(len(blocks), -1)
    assert matrix.scale is not None
    if matrix.format == FP8_BLOCK:
        return _scaled_blocks(_e4m3(matrix.codes), matrix.scale.numpy())
    if matrix.format in (FP8_ROW, MXFP8):
        weights = _e4m3(matrix.codes)
    elif matrix.format == INT8_ROW:
        weights = matrix.codes.numpy().astype(np.float32)
    elif matrix.format in (MXFP4, NVFP4):
        weights = _nibbles(matrix.codes, tuple(v * s for s in (1, -1) for v in _E2M1))
    else:
        offset = 0 if matrix.zero is not None else 8
        weights = _nibbles(matrix.codes, tuple(float(code - offset) for code in range(16)))
    if matrix.format in (FP8_ROW, INT8_ROW, INT4_ROW):
        weights *= matrix.scale.numpy()[:, None]
        return weights
    scale = _scales(matrix)
    groups = weights.reshape(len(weights), scale.shape[1], -1)  # a view
    if matrix.zero is not None:
        groups -= matrix.zero.numpy()[..., None]
    groups *= scale[..., None]
    if matrix.format == NVFP4:
        weights *= np.float32(matrix.global_scale)
    return weights


def _scales(matrix: QuantisedMatrix) -> np.ndarray:
    """The scales of groups, float32 [N, K/g]."""
    assert matrix.scale is not None
    if matrix.format in (MXFP8, MXFP4):
        exponents = matrix.scale.view(torch.uint8).numpy().astype(np.int32) - 127
        return np.ldexp(np.float32(1), exponents)
    if matrix.format == NVFP4:
        return _e4m3(matrix.scale)
    return matrix.scale.float().numpy()


def _scaled_blocks(weights: np.ndarray, scale: np.ndarray) -> np.ndarray:
    for i, row in enumerate(scale):
        weights[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE] *= row.repeat(BLOCK_SIZE)[: weights.shape[1]]
    return weights


def _nibbles(codes: torch.Tensor, values: tuple[float, ...]) -> np.ndarray:
    """The values of two codes per byte, [N, K]."""
    return _nibble_pairs(values)[codes.numpy()].view(np.float32).reshape(len(codes), -1)


@functools.cache
def _nibble_pairs(values: tuple[float, ...]) -> np.ndarray:
    """For each byte, the values of its low and its high nibble in the place of a float64."""
    table = np.array(values, np.float32)
    code = np.arange(256)
    return np.stack([table[code & 15], table[code >> 4]], -1).view(np.float64)[:, 0]


def _e4m3(codes: torch.Tensor) -> np.ndarray:
    """Converts codes by a table of pairs."""
    bits = codes.contiguous().view(torch.uint8)
    if bits.numel() % 2:
        return bits.view(torch.float8_e4m3fn).float().numpy()
    pairs = bits.view(-1).numpy().view(np.uint16)
    return _e4m3_pairs()[pairs].view(np.float32).reshape(codes.shape)


@functools.cache
def _e4m3_pairs() -> np.ndarray:
    """For each pair of codes, the first in the low byte, two float32 in the place of a float64."""
    codes = torch.arange(65536, dtype=torch.int32, device="cpu").to(torch.uint16)
    values = codes.view(torch.uint8).view(torch.float8_e4m3fn).float()
    return values.numpy().view(np.float64)
