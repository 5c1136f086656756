"""Quantised matrices for tests: made from weights, and what they stand for.

The values are computed from the formats' own descriptions, apart from readers, packing and kernels:
OCP Microscaling Formats 1.0 (e2m1, ue8m0), OFP8 1.0 (e4m3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..weights.formats import (
    FP8_BLOCK,
    FP8_ROW,
    INT4_GROUP,
    INT4_ROW,
    INT4_ZERO,
    INT8_ROW,
    MXFP4,
    MXFP8,
    NVFP4,
    WeightForm,
)
from ..weights.quantised import SCALE_TYPES, QuantisedMatrix

_E2M1_LARGEST, _E4M3_LARGEST = 6.0, 448.0


def int4_settings(ignore: Sequence[str]) -> dict[str, Any]:
    """The quantization_config that compressed-tensors writes for 4-bit integers with a scale for
    each 32 columns. ignore: modules in 16 bits, by name or as "re:" and an expression."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "strategy": "group",
                    "group_size": 32,
                    "symmetric": True,
                    "dynamic": False,
                },
                "input_activations": None,
            }
        },
    }


def _minifloat(bits: int, exponent_bits: int, bias: int) -> torch.Tensor:
    """Values of all codes of a small float with subnormals, float64, without special codes."""
    mantissa_bits = bits - 1 - exponent_bits
    codes = torch.arange(2**bits)
    mantissa = (codes % 2**mantissa_bits).double() / 2**mantissa_bits
    exponent = (codes >> mantissa_bits) % 2**exponent_bits
    normal = (1 + mantissa) * 2.0 ** (exponent - bias).double()
    size = torch.where(exponent == 0, mantissa * 2.0 ** (1 - bias), normal)
    return torch.where(codes >> (bits - 1) == 1, -size, size)


E2M1 = _minifloat(4, 2, 1)
E4M3 = _minifloat(8, 4, 7)
E4M3[[0x7F, 0xFF]] = torch.nan
UE8M0 = 2.0 ** (torch.arange(256).double() - 127)
UE8M0[255] = torch.nan


def unpack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[N, K] codes of bytes [N, K/2], the lower half of a byte first."""
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [N, K/2] of codes [N, K]."""
    codes = codes.to(torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4


def values_of(matrix: QuantisedMatrix) -> torch.Tensor:
    """W, float64 [N, K], its columns in their own order."""
    stored = _stored_values(matrix)
    if matrix.order is None:
        return stored
    values = torch.empty_like(stored)
    values[:, matrix.order.long()] = stored
    return values


def _stored_values(matrix: QuantisedMatrix) -> torch.Tensor:
    """W with its columns as they are stored."""

    def spread(scale: torch.Tensor, columns: int) -> torch.Tensor:
        return scale.double().repeat_interleave(columns // scale.shape[1], dim=1)

    if matrix.format.ggml:
        from gguf import GGMLQuantizationType, quants  # ggml's own; only tests need it

        kind = GGMLQuantizationType[matrix.format.name]
        return torch.from_numpy(quants.dequantize(matrix.codes.numpy(), kind)).double()
    bytes_, scale = matrix.codes.view(torch.uint8), matrix.scale
    assert scale is not None
    if matrix.format in (FP8_BLOCK, FP8_ROW, MXFP8):
        weights = E4M3[bytes_.long()]
        rows, columns = weights.shape
        if matrix.format == FP8_ROW:
            return weights * scale.double()[:, None]
        if matrix.format == MXFP8:
            return weights * spread(UE8M0[scale.view(torch.uint8).long()], columns)
        row, column = torch.arange(rows) // 128, torch.arange(columns) // 128
        return weights * scale.double()[row[:, None], column[None]]
    if matrix.format == INT8_ROW:
        return matrix.codes.double() * scale.double()[:, None]
    codes = unpack_nibbles(bytes_).long()
    columns = codes.shape[1]
    if matrix.format == INT4_ROW:
        return (codes - 8) * scale.double()[:, None]
    if matrix.format in (INT4_GROUP, INT4_ZERO):
        zero = 8.0 if matrix.zero is None else spread(matrix.zero, columns)
        return (codes - zero) * spread(scale, columns)
    if matrix.format == MXFP4:
        return E2M1[codes] * spread(UE8M0[scale.view(torch.uint8).long()], columns)
    assert matrix.format == NVFP4
    whole = float(torch.tensor(matrix.global_scale, dtype=torch.float32))
    return E2M1[codes] * spread(E4M3[scale.view(torch.uint8).long()], columns) * whole


def quantise(weights: torch.Tensor, form: WeightForm) -> QuantisedMatrix:
    """A matrix of the form that is near to weights [N, K], which are finite. Of ggml's formats
    those that the gguf package can make: Q4_1, Q5_0, Q5_1 and Q8_0."""
    w = weights.detach().cpu().float()
    if form.format.ggml:
        from gguf import GGMLQuantizationType, quants

        blocks = quants.quantize(w.numpy(), GGMLQuantizationType[form.format.name])
        return QuantisedMatrix(form.format, torch.from_numpy(blocks), None)
    if form.format in (INT4_GROUP, INT4_ZERO):
        return _int4(w, form)
    if form.format in (INT8_ROW, INT4_ROW):
        largest = 127 if form.format == INT8_ROW else 7
        scale = _nonzero(w.abs().amax(1)) / largest
        codes = (w / scale[:, None]).round().clamp(-largest, largest)
        packed = codes.to(torch.int8) if form.format == INT8_ROW else pack_nibbles(codes + 8)
        return QuantisedMatrix(form.format, packed, scale)
    if form.format == FP8_BLOCK:
        rows, columns = w.shape
        padded = torch.nn.functional.pad(w, (0, -columns % 128, 0, -rows % 128))
        blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        scale = _nonzero(blocks.abs().amax((1, 3))) / _E4M3_LARGEST
        spread = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        return QuantisedMatrix(form.format, _e4m3(w / spread), scale)
    if form.format == FP8_ROW:
        scale = _nonzero(w.abs().amax(1)) / _E4M3_LARGEST
        return QuantisedMatrix(form.format, _e4m3(w / scale[:, None]), scale)
    if form.format in (MXFP8, MXFP4):
        groups = w.unflatten(1, (-1, 32))
        largest_exponent = 8 if form.format == MXFP8 else 2
        exponent = _nonzero(groups.abs().amax(-1)).log2().floor() - largest_exponent
        scaled = (groups / exponent.exp2()[..., None]).flatten(1)
        codes = _e4m3(scaled) if form.format == MXFP8 else pack_nibbles(_e2m1(scaled))
        return QuantisedMatrix(form.format, codes, (exponent + 127).to(torch.uint8))
    assert form.format == NVFP4
    whole = float(_nonzero(w.abs().amax()) / (_E2M1_LARGEST * _E4M3_LARGEST))
    groups = w.unflatten(1, (-1, 16))
    scale = _e4m3(_nonzero(groups.abs().amax(-1)) / _E2M1_LARGEST / whole)
    scaled = groups / (_nonzero(scale.float()) * whole)[..., None]
    return QuantisedMatrix(NVFP4, pack_nibbles(_e2m1(scaled.flatten(1))), scale, global_scale=whole)


def _int4(w: torch.Tensor, form: WeightForm) -> QuantisedMatrix:
    groups = w.unflatten(1, (-1, form.group_size))
    dtype = tuple(SCALE_TYPES)[form.scale_type]
    if form.format == INT4_GROUP:
        scale = (_nonzero(groups.abs().amax(-1)) / 7).to(dtype)
        codes = (groups / scale.float()[..., None]).round().clamp(-8, 7) + 8
        return QuantisedMatrix(INT4_GROUP, pack_nibbles(codes.flatten(1)), scale)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = (_nonzero(high - low) / 15).to(dtype)
    zero = (-low / scale.float()).round().clamp(0, 15)
    codes = (groups / scale.float()[..., None]).round() + zero[..., None]
    packed = pack_nibbles(codes.clamp(0, 15).flatten(1))
    return QuantisedMatrix(INT4_ZERO, packed, scale, zero.to(torch.uint8))


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _e4m3(values: torch.Tensor) -> torch.Tensor:
    return values.clamp(-_E4M3_LARGEST, _E4M3_LARGEST).to(torch.float8_e4m3fn)


def _e2m1(values: torch.Tensor) -> torch.Tensor:
    """Codes of the nearest values."""
    edges = ((E2M1[:7] + E2M1[1:8]) / 2).float()
    return torch.bucketize(values.abs(), edges) + 8 * (values < 0)
