"""The packed bytes are those that kernels/include/kt/format.h describes, and do not change.

Golden sources are made by arithmetic alone, so that nothing but a change of the layout, or of the
rules for quantising, changes a hash. Then kLayoutVersion changes too.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from . import core, ggml, layout_writer, sources
from .core import BF16, INT4_GROUP
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

LAYOUT_VERSION = 2
# 96: a cache line of lanes is no whole group
DENSE = [*(f[:2] for f in core.DENSE), (INT4_GROUP, 96)]
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
    "10-0-0": "d2abc0c9e6cddb944079d0e05436bba5043f68d706a2028b1a26e5ac9bc5675f",
    "11-0-0": "963e081f580d6c553d07850896d2876d28adf4a499e49cafee2a52f369b2e861",
    "12-0-0": "d1a5bb4b770fdf792b7d67cb187adaa47d91d373b40bfba1f0fc5d320d9745b5",
    "13-0-0": "3b6f1b88a61675edf0c8eeb4d7a030d54b759db794285ce6f1626358f3c023ff",
    "14-0-0": "3736f18bc78f9888c26e6d5238ce3ef5210e4be12f24e6c93b363552233f9d30",
    "15-0-0": "46a527d413b278e85af5c28bfc836e24b0bdbe43fc56d47755727c2be83f671f",
    "16-0-0": "5c06dc261d9baad430da9f112b769ea7c058707d897048659c2aa18648623cc1",
    "17-0-0": "fd371066561ad79369da3b94b85523f90fb854e0433073cb563d82b7883b4068",
    "18-0-0": "878e9f37189b1a33ff71fd15e05b4a880a2b87c300621e06eab9dd62bc3ddc2f",
    "19-0-0": "d681a9075693aa9a597a4cab45b3bdfa354cea5e603a7d59acc7b49a6c736acc",
    "20-0-0": "2c84cef3e31ed92e01e721add94fea621f43dcc7ecad3aa3ad3917bf07534439",
    "0-0-dense0": "184f4dcd149df4f5da1170de01d799bb4b955f69c40f401e793c584a1dab1d78",
    "0-0-dense1": "2d7131fcbbff27bf0a9305478e4fdf8b62f8b006bc5ad2315e22d58d3c9b01b5",
    "0-0-dense2": "184f4dcd149df4f5da1170de01d799bb4b955f69c40f401e793c584a1dab1d78",
    "1-0-dense0": "8cab36e5bfe618206f5a20961a83d570b2fd74c762f62361027dd5f6d4e6f4b8",
    "1-0-dense1": "b0125004add7c5d1867d3885f53e9608053c6d4916746093b8017908af9e5417",
    "1-0-dense2": "8cab36e5bfe618206f5a20961a83d570b2fd74c762f62361027dd5f6d4e6f4b8",
    "2-0-dense0": "6e9301d2d08d7cc469c34202254f745ea7af9d689354c5b3e3eb7a7272b8a28a",
    "2-0-dense1": "c17a5ffd4bcb21adbaf6169e1abe234b9c25646f28b7d2feeca75aa7a5be1c04",
    "2-0-dense2": "6e9301d2d08d7cc469c34202254f745ea7af9d689354c5b3e3eb7a7272b8a28a",
    "3-32-dense0": "25107d4d781c1c001c54b421781476e696934d80030bb5da001da5ea8a171b31",
    "3-32-dense1": "7a15bf825119a10252aacbfdac52ed92ec826b2ee60b6d0e3ad670a879403277",
    "3-32-dense2": "25107d4d781c1c001c54b421781476e696934d80030bb5da001da5ea8a171b31",
    "3-128-dense0": "d68e187e3c21ab34f368e74d27b91eae6e5aaa6c52d69fc2b4e3fbb58ac7572a",
    "3-128-dense1": "03c42a60fc886b2fbe49339034f9ea0a7818da92a6df898c8a07647cbf379f02",
    "3-128-dense2": "d68e187e3c21ab34f368e74d27b91eae6e5aaa6c52d69fc2b4e3fbb58ac7572a",
    "3-96-dense0": "109136e09de6a6ffdfb7a824f505d51f49699e2d7642d83be726681e0fcef90b",
    "3-96-dense1": "754b23631872813ce3f28b6f94c23ffa43868a312d53cdcbef3f47c03a9c3c61",
    "3-96-dense2": "109136e09de6a6ffdfb7a824f505d51f49699e2d7642d83be726681e0fcef90b",
}


def golden_blocks(format: int) -> ggml.GgmlSource:
    """75 rows of two blocks: every byte of a block varies; scales stay finite."""
    shape = (75, 2, ggml.BLOCK_BYTES[format])
    i, j, b = np.indices(shape)
    source = ggml.GgmlSource(
        format, ((37 * i + 101 * j + 11 * b + i * b % 7) % 256).astype(np.uint8)
    )
    number = np.arange(150).reshape(75, 2)
    for which in range(len(ggml.HALVES[format])):
        source.set_halves(which, (number * 397 + which * 131) % 0x7C00 + 0x8000 * (number % 3 == 1))
    return source


def golden_source(format: int, group: int, scale_type: int) -> Source | ggml.GgmlSource:
    """75 rows: three tiles with a tail. Columns: two and a half blocks where they may be ragged."""
    if format in ggml.GGML:
        return golden_blocks(format)
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
    got = core.core_with(module, "avx2").pack(*variant, *source.shape, source.address)
    compare(module, "-".join(map(str, variant)), got, layout_writer.tiles_of(source))


@modules
@pytest.mark.parametrize("dtype", [0, 1, 2], ids=["bf16", "fp16", "float32"])
@pytest.mark.parametrize("format,group", DENSE)
def test_golden_bytes_of_dense_weights(module: str, format: int, group: int, dtype: int) -> None:
    n, k = 75, group * 6 or 675
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


@pytest.mark.parametrize("dtype", [0, 1, 2], ids=["bf16", "fp16", "float32"])
@pytest.mark.parametrize("group", [32, 96, 256])
def test_quotients_at_and_beside_ties(group: int, dtype: int) -> None:
    """What is a product with the reciprocal elsewhere is the quotient here, to the last bit."""
    rng = np.random.default_rng(group)
    rows, groups = 64, 6
    # fp16 scales: exact, with all bits of the mantissa set, and of the smallest numbers.
    scale = rng.choice([1.0, 1 + 1023 / 1024, 1.3330078125], (rows, groups, 1))
    scale = scale * 2.0 ** rng.integers(-24, 9, scale.shape)
    ties = rng.integers(-7, 7, (rows, groups, group)) + 0.5
    w = (ties * scale).astype(np.float32)
    steps = rng.integers(-2, 3, w.shape)
    for _ in range(2):  # up to two numbers away from the tie
        w = np.where(steps > 0, np.nextafter(w, np.float32(np.inf)), w)
        w = np.where(steps < 0, np.nextafter(w, np.float32(-np.inf)), w)
        steps -= np.sign(steps)
    w[..., 0] = (7 * scale[..., 0]).astype(np.float32)  # what the scale is made of
    w = w.reshape(rows, groups * group).astype(np.float32)
    source: Any = w
    if dtype == 0:
        source = layout_writer.bf16_bits(w)
        w = sources.bf16_values(source).astype(np.float32)
    elif dtype == 1:
        source = w.astype(np.float16)
        w = source.astype(np.float32)
    address = (source.ctypes.data, 0, 0, 1.0)
    got = core.core_with("_C", "avx2").pack(INT4_GROUP, group, FP16, *w.shape, address, dtype)
    np.testing.assert_array_equal(got, layout_writer.dense_tiles_of(INT4_GROUP, w, group))
