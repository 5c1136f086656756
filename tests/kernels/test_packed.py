"""Packed weights out of a layer and into another: the same bytes whatever the pools; checked."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from grid import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from . import core, sources
from .core import BF16, FORMATS, INT4_GROUP, INT4_ROW, INT8_ROW, Format, Layer, formats
from .sources import FP8_BLOCK, FP8_ROW, INT4_ZERO, MXFP4, MXFP8, NVFP4

Bytes = npt.NDArray[np.uint8]
POOLS = [(1,), (1, 2), (1, 0, 1, 1)]
TABLE = "amx" if "amx" in core._C.kernel_tables() else "avx2"
Q3_K, Q4_K, Q5_K, IQ4_XS, Q8_0 = 15, 16, 17, 20, 13


def sizes(format: Format) -> tuple[int, int]:
    """(H, I): of I three units of a pool's part, the last cut short where that may be."""
    return format.fit(70, 2 * format.pool_unit + 33)  # type: ignore[return-value]


def layer_of(format: Format, threads: tuple[int, ...], **rest: Any) -> Layer:
    rest = {"threads": threads, "biases": True, **rest}
    return Layer.of(("_C", TABLE), format, 2, 2, *sizes(format), **rest)


def pack(layer: Layer, slot: int, matrix: int) -> Bytes:
    """By the packing of a single matrix."""
    form = (layer.format, layer.group, layer.scale_type or 0)
    source = layer.weights[matrix][slot]
    return core._C.pack(*form, *layer.shapes[matrix], sources.address_of(source))


def shape(layer: Layer, matrix: int) -> tuple[int, int]:
    form = (layer.format, layer.group, layer.scale_type or 0)
    return core._C.packed_shape(*form, *layer.shapes[matrix])


def save(layer: Layer, slot: int) -> list[Bytes]:
    saved = [np.full(shape(layer, m), 0xAA, np.uint8) for m in range(3)]
    for m, tiles in enumerate(saved):
        layer.layer.save_packed(slot, m, tiles)
    return saved


def unaligned(tiles: Bytes) -> Bytes:
    """The same where a file may have it: at an odd address."""
    room = np.empty(tiles.size + 1, np.uint8)
    room[1:] = tiles.reshape(-1)
    return room[1:]


def load(layer: Layer, slot: int, tiles: list[Bytes]) -> None:
    tiles = [unaligned(t) for t in tiles]
    layer.layer.load_packed(slot, *tiles, *(b[slot] for b in layer.bias))


@formats(FORMATS)
def test_saved_and_loaded(format: Format) -> None:
    layers = [layer_of(format, threads) for threads in POOLS]
    expected = [[pack(layers[0], slot, m) for m in range(3)] for slot in range(2)]
    batches = [layers[0].batch(t) for t in (3, 40)]
    for layer in layers:
        results = [layer.forward(*b) for b in batches]
        unpacked = layer.unpacked()
        for slot in range(2):
            for got, tiles in zip(save(layer, slot), expected[slot], strict=True):
                np.testing.assert_array_equal(got, tiles)
        empty = layer_of(format, layer.threads, seed=7)  # of other weights and biases
        empty.bias = layer.bias
        for slot in range(2):
            load(empty, slot, expected[slot])
        for got, wanted in zip(empty.unpacked(), unpacked, strict=True):
            np.testing.assert_array_equal(got, wanted)
        for batch, wanted in zip(batches, results, strict=True):
            np.testing.assert_array_equal(empty.forward(*batch), wanted)


@settings(max_examples=examples(40), deadline=None)
@given(
    format=st.sampled_from(FORMATS),
    hidden=st.integers(1, 200),
    inter=st.integers(1, 400),
    threads=st.lists(st.integers(0, 2), min_size=1, max_size=4).filter(any).map(tuple),
)
def test_any_shape_and_pools(
    format: Format, hidden: int, inter: int, threads: tuple[int, ...]
) -> None:
    layer = Layer.of(("_C", "avx2"), format, 1, 1, *format.fit(hidden, inter), threads=threads)
    saved = save(layer, 0)
    for m, tiles in enumerate(saved):
        np.testing.assert_array_equal(tiles, pack(layer, 0, m))
    load(layer, 0, saved)
    for got, tiles in zip(save(layer, 0), saved, strict=True):
        np.testing.assert_array_equal(got, tiles)


def test_forms_may_differ() -> None:
    mix = (Format(BF16), Format(MXFP4, 0, 0), Format(INT4_ZERO, 128, 0))
    layers = [
        Layer(("_C", TABLE), 0, 0, 2, 1, 128, 384, mixed=mix, threads=threads, seed=seed)
        for threads, seed in (((1,), 1), ((1, 1), 2))
    ]
    before = layers[0].unpacked()
    for slot in range(2):
        saved = []
        for m, f in enumerate(mix):
            saved.append(np.empty(core._C.packed_shape(*f.form, *layers[0].shapes[m]), np.uint8))
            layers[0].layer.save_packed(slot, m, saved[m])
        load(layers[1], slot, saved)
    for got, wanted in zip(layers[1].unpacked(), before, strict=True):
        np.testing.assert_array_equal(got, wanted)


# --- files that lie -----------------------------------------------------------------------------

BAD_SCALE = "a scale is NaN, infinite or negative"
F32_NAN, F32_MINUS, F32_INF = b"\0\0\xc0\x7f", b"\0\0\x80\xbf", b"\0\0\x80\x7f"
F16_NAN, BF16_INF = b"\0\x7e", b"\x80\x7f"
NAN_CODE = "a weight is NaN"
E8M0 = "a ue8m0 scale is 255"
# Format, what is written, at which byte of a tile for row 5, and what is said.
LIES = [
    *[(Format(FP8_ROW, 0, 0), bad, 20, BAD_SCALE) for bad in (F32_NAN, F32_MINUS, F32_INF)],
    *[
        (Format(f, 0, None), bad, 20, "a scale is NaN or infinite")
        for f in (INT8_ROW, INT4_ROW)
        for bad in (F32_NAN, F32_INF)
    ],
    (Format(FP8_BLOCK, 0, 0), F32_NAN, 0, BAD_SCALE),
    (Format(FP8_BLOCK, 0, 0), b"\x7f", 64 + 128 + 20, NAN_CODE),
    (Format(FP8_ROW, 0, 0), b"\xff", 128 + 128 + 21, NAN_CODE),
    (Format(MXFP8, 0, 0), b"\xff", 5, E8M0),
    (Format(MXFP8, 0, 0), b"\xff", 32 + 5, E8M0),
    (Format(MXFP8, 0, 0), b"\x7f", 64 + 128 + 23, NAN_CODE),
    (Format(MXFP4, 0, 0), b"\xff", 64 + 1024 + 5, E8M0),
    (Format(NVFP4, 0, 0), F32_NAN, 0, "the global scale is NaN"),
    (Format(NVFP4, 0, 0), b"\x80", 64 + 5, "an e4m3 scale is NaN or has its sign set"),
    (Format(INT4_GROUP, 32, 0), F16_NAN, 10, "a scale is NaN or infinite"),
    (Format(INT4_GROUP, 32, 1), BF16_INF, 64 + 512 + 10, "a scale is NaN or infinite"),
    (Format(INT4_GROUP, 128, 2), F32_INF, 20, "a scale is NaN or infinite"),
    (Format(INT4_ZERO, 32, 0), F16_NAN, 10, "a scale is NaN or infinite"),
    (Format(INT4_ZERO, 32, 0), b"\x11", 64 + 5, "a zero point is above 16"),
    (Format(INT4_ZERO, 128, 2), b"\xff", 128 + 5, "a zero point is above 16"),
    (Format(Q8_0, 0, 0), F16_NAN, 10, "a block's fp16 scale or minimum is NaN"),
    (Format(Q4_K, 0, 0), F16_NAN, 64 + 10, "a block's fp16 scale or minimum is NaN"),
    (Format(Q4_K, 0, 0), b"\x40", 128 + 32 + 5, "a sub-block's scale or minimum has more than 6"),
    (Format(Q5_K, 0, 0), b"\xff", 128 + 5, "a sub-block's scale or minimum has more than 6 bits"),
    (Format(Q3_K, 0, 0), b"\x20", 64 + 5, "a sub-block's scale or minimum has more than 6 bits"),
    (Format(IQ4_XS, 0, 0), b"\xdf", 64 + 5, "a sub-block's scale or minimum has more than 6 bits"),
]


@pytest.mark.parametrize("number", range(len(LIES)))
@pytest.mark.parametrize("matrix", range(3), ids=["gate", "up", "down"])
def test_what_packing_does_not_make_is_refused(number: int, matrix: int) -> None:
    format, bad, at, message = LIES[number]
    layer = layer_of(format, (1, 2))
    tiles = save(layer, 1)
    good = tiles[matrix][1].copy()
    tiles[matrix][1, at : at + len(bad)] = np.frombuffer(bad, np.uint8)
    name = ("gate", "up", "down")[matrix]
    row = 32 if format.code == FP8_BLOCK and len(bad) == 4 else 37
    place = name if "global" in message else f"{name} row {row}"
    with pytest.raises(ValueError, match="^" + re.escape(f"expert slot 1, {place}: {message}")):
        load(layer, 1, tiles)
    tiles[matrix][1] = good
    load(layer, 1, tiles)
    for got, wanted in zip(save(layer, 1), tiles, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_the_first_of_several_errors_is_told() -> None:
    """In the order of the tiles, gate and up by turns: whatever the pools and threads."""
    places = [
        (0, 2, "gate row 69"),
        (1, 1, "up row 37"),
        (2, 2, "down row 69"),
        (2, 0, "down row 5"),
    ]
    for threads in [(1,), (2,), (5,), (1, 2), (1, 0, 1, 1)]:
        layer = layer_of(Format(INT8_ROW), threads)
        for broken, first in ((places, 1), (places[:1] + places[2:], 0), (places[2:], 1)):
            tiles = save(layer, 1)
            dense = [w.copy() for w in layer.weights]
            for matrix, tile, _ in broken:
                tiles[matrix][tile, 20:24] = np.frombuffer(F32_NAN, np.uint8)
                dense[matrix][1, tile * 32 + 5, 7] = np.nan
            message = f"^expert slot 1, {broken[first][2]}: "
            with pytest.raises(ValueError, match=message):
                layer.layer.load(1, *[sources.address_of(w[1]) for w in dense], dtypes=[2] * 3)
            with pytest.raises(ValueError, match=message):
                load(layer, 1, tiles)
            load(layer, 1, save(layer_of(Format(INT8_ROW), (1,)), 1))


def test_sums_of_codes_are_not_believed() -> None:
    """A file's sums of int8 codes, which kernels take for what they are, are made anew."""
    for threads in POOLS:
        layer = layer_of(Format(INT8_ROW), threads)
        batch = layer.batch(9)
        expected, tiles = layer.forward(*batch), save(layer, 1)
        right = [t.copy() for t in tiles]
        for t in tiles:
            t[:, 128:256] = 0x7F
        load(layer, 1, tiles)
        np.testing.assert_array_equal(layer.forward(*batch), expected)
        for got, wanted in zip(save(layer, 1), right, strict=True):
            np.testing.assert_array_equal(got, wanted)


@settings(max_examples=examples(60), deadline=None)
@given(format=st.sampled_from(FORMATS), seed=st.integers(0, 1 << 30), few=st.booleans())
def test_any_bytes_are_refused_or_computed_with(format: Format, seed: int, few: bool) -> None:
    layer = layer_of(format, (1, 1))
    rng = np.random.default_rng(seed)
    tiles = save(layer, 0)
    for t in tiles:
        count = 3 if few else t.size
        t.reshape(-1)[rng.permutation(t.size)[:count]] = rng.integers(0, 256, count, np.uint8)
    try:
        load(layer, 0, tiles)
    except ValueError as error:
        assert re.match(r"expert slot 0, (gate|up|down)( row \d+)?: ", str(error))
        return
    for tokens in (3, 40):
        x, ids, weights = layer.batch(tokens)
        layer.forward(x, np.where(ids > 0, ids, 0), weights)


def test_arguments() -> None:
    layer = layer_of(Format(INT8_ROW), (1,), cpu_slots=[True, False])
    tiles = [np.zeros(shape(layer, m), np.uint8) for m in range(3)]
    for slot in (1, 2, -1):
        with pytest.raises(ValueError, match="not held"):
            layer.layer.save_packed(slot, 0, tiles[0])
        with pytest.raises(ValueError, match="not held"):
            layer.layer.load_packed(slot, *tiles)
    for matrix in (-1, 3):
        with pytest.raises(ValueError, match="accepted: 0 to 2"):
            layer.layer.save_packed(0, matrix, tiles[0])
    with pytest.raises(ValueError, match=r"^up has \d+ values; expected \d+$"):
        layer.layer.load_packed(0, tiles[0], tiles[1][:-1], tiles[2])
    with pytest.raises(ValueError, match=r"^down_bias has 3 values; expected \d+$"):
        layer.layer.load_packed(0, *tiles, down_bias=np.zeros(3, np.float32))
    for arguments, message in (
        ((99, 0, 0, 32, 32), "unknown weight format 99"),
        ((INT4_GROUP, 48, 0, 32, 96), "group size 48"),
        ((MXFP4, 0, 0, 32, 48), "48 columns; this weight format needs a multiple of 32"),
        ((BF16, 0, 0, 1 << 62, 1 << 62), "accepted: 1 to 65536 rows and columns"),
        ((BF16, 0, 0, 32, 0), "accepted: 1 to 65536 rows and columns"),
    ):
        with pytest.raises(ValueError, match=message):
            core._C.packed_shape(*arguments)
