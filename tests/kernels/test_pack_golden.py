"""The packed bytes are those that kernels/include/kt/format.h describes, and do not change.

Golden sources are made by arithmetic alone, so that nothing but a change of the layout, or of the
rules for quantising, changes a hash. Then kLayoutVersion changes too.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from . import core, layout_writer, sources
from .core import BF16
from .sources import (
    BFLOAT16,
    E4M3_CODES,
    FP8_BLOCK,
    FP8_ROW,
    FP16,
    INT4_ZERO,
    MXFP4,
    MXFP8,
    NVFP4,
    Source,
)

modules = pytest.mark.parametrize("module", ["_C", "_C_emul"])

LAYOUT_VERSION = 1
GOLDEN: dict[str, str] = {
    "3-32-0": "a9b4130cd42d570be3bd54d152302841eb49251acc75e69cf14d43637810ccf0",
    "3-32-1": "235bd10ae92c6046229d93dc9dd3405219df8f537eaaf0075b13ee813e644d89",
    "3-32-2": "db77639dd9726434c6d51e5b0034052970becd2f21312a2ea7ccc3a7dd49c661",
    "3-128-0": "ab035aaa5d9d99f9c0c24999fa4d67e8769b9e9ff46cf4d6c203fdd43c8168a3",
    "3-128-1": "458724b2fb16ebf36d309b9f11f121eaa972e79d557af9a01cba55f5ead8a232",
    "3-128-2": "4160e2e39c09ffbb509d6e63238323f3092ae8c177325e24ee8417931c53f63e",
    "4-32-0": "df096e45c6d521f561fe99354bce1528699a959991e960d06e6f9df223da91d6",
    "4-32-1": "15946d81eccd15aec793c7833e1fa1d731fab1946ec5bef507a06313618436e5",
    "4-32-2": "ac3d06867c90a6b277111a0f95cc030f3dd8d6a07cce211e5bf2840ff454d698",
    "4-128-0": "d9025744a56a313c5c079b5506e74c5fff409bb741893b005a800162ba8eb557",
    "4-128-1": "683a3ab229a22279bfae92ead895b4e0c06e2dc07adead7b148d81233a992276",
    "4-128-2": "0a1ab6ee12bc05dac365276137be57f7d6503e66a9621c37189897feaa1ef521",
    "5-0-0": "fd70293b016aff70788edc5af1dbd6602ce5703c5da02314695283e90c507570",
    "6-0-0": "b573a8334599a630294a461c3539fdde81745d14edc42e4c649f7a79f033c308",
    "7-0-0": "babfab9c3fbe4547ce09c407b26c3e8e28bd62c74fbd1fdc30cbc8032b5ad2ad",
    "8-0-0": "217ec37516cc3c51ee94fe34a6c4f3ff42fd9a1178f41836d4d15fdc45ae51df",
    "9-0-0": "8fb4c82cf0bd08e7e234216e027ab311f554a90c233d06bc0247f6095b876f6d",
    "0-0-dense0": "27a1e16eca91e0e367085cdd9065ab69fc5e5ddfd01850e8f0ed2fe73efc519c",
    "0-0-dense1": "95fb2fdf6c4a5d14e153e6ff64026eab71e97477d04746dcf8dd051cc4307c29",
    "0-0-dense2": "27a1e16eca91e0e367085cdd9065ab69fc5e5ddfd01850e8f0ed2fe73efc519c",
    "1-0-dense0": "5fe8f52651319e7167f661f425928a2ad4fac9fc547bef70f91143dfca2f070a",
    "1-0-dense1": "fa97a52b6e88529b073a8498c84f3ad14d544623e29fc1ff54801f86474a9340",
    "1-0-dense2": "5fe8f52651319e7167f661f425928a2ad4fac9fc547bef70f91143dfca2f070a",
    "2-0-dense0": "35cefd4f4a87f3147624eb1c911e64c4af4e16966fc8388e3ea6f9a1fc682707",
    "2-0-dense1": "e867b3c204b698d2c5b66adaee94bdd27802cc6a81cbabf832b90193731f9f13",
    "2-0-dense2": "35cefd4f4a87f3147624eb1c911e64c4af4e16966fc8388e3ea6f9a1fc682707",
    "3-32-dense0": "653f0997707ae5a27e460aa740b4bce8f505ca40af055ffe04cc87289af46c54",
    "3-32-dense1": "07560ec1f010246c13f9bbdd5b6150962d7f306dbe0019827937aecb9307c806",
    "3-32-dense2": "653f0997707ae5a27e460aa740b4bce8f505ca40af055ffe04cc87289af46c54",
    "3-128-dense0": "cf52d2eb4ea03479e0d2f9dbf7e2aa09d7bb85791492e5c5e4670427c862e738",
    "3-128-dense1": "4eab33cdf0a798030943473cb98b495141542091babb57649edb775e1bd0bb51",
    "3-128-dense2": "cf52d2eb4ea03479e0d2f9dbf7e2aa09d7bb85791492e5c5e4670427c862e738",
}


def golden_source(format: int, group: int, scale_type: int) -> Source:
    """75 rows: three tiles with a tail. Columns: two and a half blocks where they may be ragged."""
    unit = sources.column_unit(format, group)
    n, k = 75, {FP8_BLOCK: 300, FP8_ROW: 75}.get(format, 3 * unit)
    i, j = np.indices((n, k))
    codes = (37 * i + 11 * j + i * j % 7) % (256 if format in E4M3_CODES else 16)
    codes = np.where(codes % 128 == 127, 5, codes) if format in E4M3_CODES else codes
    shape = sources.scale_shape(format, n, k, group)
    number = np.arange(int(np.prod(shape))).reshape(shape)
    scale: Any
    if format in (MXFP8, MXFP4, NVFP4):
        scale = (number * 29 % (127 if format == NVFP4 else 255)).astype(np.uint8)
    elif group and scale_type == BFLOAT16:
        scale = (number * 397 % 0x7F80).astype(np.uint16)
    elif group and scale_type == FP16:
        scale = (number * 397 % 0x7C00).astype(np.uint16).view(np.float16)
    else:
        scale = (number * 7919 % 0x7F80 * 0x10001).astype(np.uint32).view(np.float32)
    zero = (number * 5 % 17).astype(np.uint8) if format == INT4_ZERO else None
    return Source(format, group, scale_type, codes.astype(np.uint8), scale, zero, 0.1875)


def compare(module: str, name: str, got: Any, expected: sources.Bytes) -> None:
    np.testing.assert_array_equal(got, expected)
    assert hashlib.sha256(got.tobytes()).hexdigest() == GOLDEN[name], name
    assert core.core_with(module, "avx2").layout_version == LAYOUT_VERSION


@modules
@pytest.mark.parametrize("variant", sources.VARIANTS, ids=str)
def test_golden_bytes(module: str, variant: tuple[int, int, int]) -> None:
    source = golden_source(*variant)
    got = core.core_with(module, "avx2").pack(*variant, *source.codes.shape, source.address)
    compare(module, "-".join(map(str, variant)), got, layout_writer.tiles_of(source))


@modules
@pytest.mark.parametrize("dtype", [0, 1, 2], ids=["bf16", "fp16", "float32"])
@pytest.mark.parametrize("format,group", core.FORMATS)
def test_golden_bytes_of_dense_weights(module: str, format: int, group: int, dtype: int) -> None:
    n, k = 75, group * 3 or 75
    i, j = np.indices((n, k))
    # Every 9th row is zero; some are so small that fp16 weights and group scales are subnormal.
    w = ((37 * i + 11 * j + i * j % 7) % 251 - 125) / 128 * (i % 9 > 0) * 2.0 ** -(i % 11 * 2)
    source: Any = w.astype(np.float16 if dtype == 1 else np.float32)
    w = source.astype(np.float32)
    if dtype == 0:
        source = layout_writer.bf16_bits(w)
        w = sources.bf16_values(source).astype(np.float32)
    address = (source.ctypes.data, 0, 0, 1.0)
    got = core.core_with(module, "avx2").pack(format, group, FP16, n, k, address, dtype)
    expected = layout_writer.dense_tiles_of(format, w, group)
    compare(module, f"{format}-{group}-dense{dtype}", got, expected)


def test_dense_floats_of_every_kind() -> None:
    """fp16: all of them. float32: every rounding edge of bf16, and what is no number."""
    module = core.core_with("_C", "avx2")
    edges = np.arange(1 << 16, dtype=np.uint32) << 16
    everything = [(np.arange(1 << 16, dtype=np.uint16).view(np.float16), 1)] + [
        ((edges + low).view(np.float32), 2) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    ]
    for w, dtype in everything:
        w = w.reshape(64, 1024)
        got = module.pack(BF16, 0, 0, *w.shape, (w.ctypes.data, 0, 0, 1.0), dtype)
        # [tiles, steps, lanes, 2] -> rows
        rows = got.view(np.uint16).reshape(2, 512, 32, 2).transpose(0, 2, 1, 3).reshape(64, 1024)
        exact = w.astype(np.float32)
        nan = np.isnan(exact)
        np.testing.assert_array_equal(np.isnan(sources.bf16_values(rows)), nan)
        expected = layout_writer.bf16_bits(exact)
        np.testing.assert_array_equal(rows[~nan], expected[~nan])
