"""Packing: quantised weights come back bit for bit, wrong ones are refused before any is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
from grid import examples, grid
from hypothesis import given, settings
from hypothesis import strategies as st

from . import core, ggml, sources
from .core import ALL_BLOCKS, BF16, INT4_GROUP, MODULES, QUANTISED, Format, Variant
from .sources import (
    BFLOAT16,
    E4M3_CODES,
    FP8_BLOCK,
    FP8_ROW,
    FP16,
    FP32,
    INT4_ZERO,
    MXFP4,
    MXFP8,
    NVFP4,
    Source,
)

Form = tuple[int, int, int]

# (I, H): within one tile and block, ragged in both, whole blocks, several blocks with tails.
SHAPES = [(1, 1), (45, 33), (32, 64), (129, 257), (300, 200), (256, 384)]
POOLS = [(1,), (3,), (1, 2), (1, 1, 1), (0, 1, 2)]
if core.SMALL_SWEEP:
    POOLS = [(1,), (1, 2), (0, 1, 2)]  # alone, shared, and with a pool that holds nothing


class QuantisedLayer:
    """Two experts of which slot 1 is held: what was loaded, and the layer that holds it."""

    def __init__(
        self,
        module: str,
        form: Form,
        inter: int,
        hidden: int,
        threads: tuple[int, ...],
        seed: int = 0,
        edges: bool = True,
    ) -> None:
        format, group, scale_type = form
        unit = sources.column_unit(format, group)
        inter, hidden = (-(-size // unit) * unit for size in (inter, hidden))
        shapes = [(inter, hidden), (inter, hidden), (hidden, inter)]
        self.matrices = [
            sources.make(format, *shape, group, scale_type, seed=3 * seed + m, edges=edges)
            for m, shape in enumerate(shapes)
        ]
        self.layer = core.core_with(module, "avx2").MoeLayer(
            core.team(module, threads),
            num_experts=2,
            top_k=1,
            hidden_size=hidden,
            intermediate_size=inter,
            forms=[form] * 3,
            cpu_slots=[False, True],
            swiglu_limit=0.0,
            swiglu_alpha=0.0,
            max_tokens=4,
            table="avx2",
            kind=0,
        )

    def load(self) -> None:
        self.layer.load(1, *[m.address for m in self.matrices])

    def unpacked(self) -> list[Any]:
        result = [np.full(m.shape, np.float32(7)) for m in self.matrices]
        for number, w in enumerate(result):
            self.layer.unpack(1, number, w)
        return [w.view(np.uint32) for w in result]

    def expected(self) -> list[Any]:
        """W rounded once, where a code times its scale is not a float32."""
        with np.errstate(over="ignore"):
            return [m.values.astype(np.float32).view(np.uint32) for m in self.matrices]

    def check(self) -> None:
        for got, expected in zip(self.unpacked(), self.expected(), strict=True):
            np.testing.assert_array_equal(got, expected)


@grid(
    module=MODULES,
    format=[*QUANTISED, *ALL_BLOCKS],
    shape=SHAPES,
    threads=POOLS,
    scales=["edges"] if core.SMALL_SWEEP else ["usual", "edges"],
)
def test_round_trip(
    module: Variant,
    format: Format,
    shape: tuple[int, int],
    threads: tuple[int, ...],
    scales: str,
) -> None:
    layer = QuantisedLayer(module.module, format.form, *shape, threads, edges=scales == "edges")
    layer.load()
    layer.check()


@settings(max_examples=examples(150), deadline=None)
@given(
    form=st.sampled_from(sources.VARIANTS),
    inter=st.integers(1, 300),
    hidden=st.integers(1, 300),
    threads=st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any).map(tuple),
    seed=st.integers(0, 100),
)
def test_any_shape_and_pools(
    form: Form, inter: int, hidden: int, threads: tuple[int, ...], seed: int
) -> None:
    layer = QuantisedLayer("_C", form, inter, hidden, threads, seed)
    layer.load()
    layer.check()


@pytest.mark.parametrize("format", [ggml.Q4_1, ggml.Q5_0, ggml.Q5_1, ggml.Q8_0])
def test_weights_that_the_gguf_package_quantised(format: int) -> None:
    w = np.random.default_rng(format).standard_normal((96, 512)).astype(np.float32)
    layer = QuantisedLayer("_C", (format, 0, FP16), 96, 512, (1, 2))
    for number, weights in enumerate((w, w[::-1], w.reshape(512, 96))):
        rows = gguf.quants.quantize(np.ascontiguousarray(weights), ggml.TYPES[format])
        blocks = rows.reshape(len(rows), -1, ggml.BLOCK_BYTES[format])
        layer.matrices[number] = ggml.GgmlSource(format, np.ascontiguousarray(blocks))
    layer.load()
    layer.check()
    error = layer.unpacked()[0].view(np.float32) - w
    assert np.abs(error).max() < (0.02 if format == ggml.Q8_0 else 0.3)


@pytest.mark.parametrize("format", sources.GROUP_FORMATS)
@pytest.mark.parametrize("group", [96, 1024])
def test_groups_of_other_sizes(format: int, group: int) -> None:
    """96: a cache line of codes is no whole group. 1024: as long as the row."""
    for scale_type in (FP16, FP32):
        layer = QuantisedLayer("_C", (format, group, scale_type), 1000, 500, (1, 1))
        layer.load()
        layer.check()


@core.formats(QUANTISED)
def test_sources_hold_every_code(format: Format) -> None:
    """What the round trips rest on."""
    code, group, scale_type = format.form
    source = sources.make_scaled(code, 256, 256, group, scale_type, edges=True)
    codes = sources.E4M3_FINITE if code in E4M3_CODES else np.arange(16)
    assert set(np.unique(source.codes)) == set(codes)
    if source.zero is not None:
        assert set(np.unique(source.zero)) == set(range(17))
    if group:
        values = sources.scale_values(source.scale, scale_type)
        assert np.any((values == 0) & np.signbit(values))
        largest = {FP16: 65504.0, BFLOAT16: 2.0**127 * (2 - 2**-7), FP32: 2.0**128 - 2.0**104}
        assert values.max() == largest[scale_type] and values[values > 0].min() < 1e-7


# What is wrong with a source: a change to it, and the message, where {row} is the row changed.
Change = Callable[[Source, int], None]


def code(value: int) -> Change:
    def change(s: Source, row: int) -> None:
        s.codes[row, -1] = value
        s.encode()

    return change


def scale(value: Any) -> Change:
    def change(s: Source, row: int) -> None:
        if s.format == FP8_BLOCK:
            s.scale[row // 128, -1] = value
        elif s.format == FP8_ROW:
            s.scale[row] = value
        else:
            s.scale[row, -1] = value

    return change


def zero(value: int) -> Change:
    def change(s: Source, row: int) -> None:
        assert s.zero is not None
        s.zero[row, -1] = value

    return change


def half(which: int, bits: int) -> Change:
    def change(s: Any, row: int) -> None:
        halves = s.halves(which)
        halves[row, -1] = bits
        s.set_halves(which, halves)

    return change


def global_scale(value: float) -> Change:
    def change(s: Source, row: int) -> None:
        s.global_scale = value

    return change


NAN_CODE = r" row {row}: a weight is NaN \(e4m3 code 0x7f or 0xff\); accepted: all other codes"
BAD_GROUP_SCALE = r" row {row}: a scale is NaN or infinite; accepted: a finite number"
BAD_BLOCK = r" row {row}: a block's fp16 scale or minimum is NaN or infinite; accepted: a finite"
BAD_SCALE = r" row {row}: a scale is NaN, infinite or negative; accepted: a finite number from 0"
BAD_E8M0 = r" row {row}: a ue8m0 scale is 255 \(NaN\); accepted: 0 to 254"
BAD_E4M3 = r" row {row}: an e4m3 scale is NaN or has its sign set; accepted: codes 0x00 to 0x7e"
BAD_ZERO = r" row {row}: a zero point is above 16; accepted: 0 to 16"
BAD_GLOBAL = r": the global scale is NaN, infinite or negative"
BAD_BF16 = (0x7F80, 0x7F81, 0xFF80, 0xFFC0)
NO_NUMBERS = (np.nan, -np.nan, np.inf, -np.inf)
NEGATIVE = (-1.0, np.float32(-1e-45))
WRONG: list[tuple[Form, Change, str]] = [
    *[((f, 0, FP16), code(c), NAN_CODE) for f in E4M3_CODES for c in (0x7F, 0xFF)],
    *[
        ((f, 0, FP16), scale(x), BAD_SCALE)
        for f in (FP8_BLOCK, FP8_ROW)
        for x in NO_NUMBERS + NEGATIVE
    ],
    *[
        ((f, 32, s), scale(x), BAD_GROUP_SCALE)
        for f in sources.GROUP_FORMATS
        for s in (FP16, FP32)
        for x in NO_NUMBERS
    ],
    *[
        ((f, 32, BFLOAT16), scale(x), BAD_GROUP_SCALE)
        for f in sources.GROUP_FORMATS
        for x in BAD_BF16
    ],
    *[
        ((f, 0, FP16), half(which, x), BAD_BLOCK)
        for f in ggml.GGML
        for which in range(len(ggml.HALVES[f]))
        for x in (0x7C00, 0xFC00, 0x7C01, 0xFFFF)
    ],
    *[((f, 0, FP16), scale(255), BAD_E8M0) for f in (MXFP8, MXFP4)],
    *[((NVFP4, 0, FP16), scale(c), BAD_E4M3) for c in (0x7F, 0xFF, 0x80, 0xB8)],
    *[((INT4_ZERO, 32, s), zero(z), BAD_ZERO) for s in (FP16, FP32) for z in (17, 255)],
    *[((NVFP4, 0, FP16), global_scale(x), BAD_GLOBAL) for x in (np.nan, np.inf, -np.inf, -1.0)],
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_what_cannot_be_used_is_refused(number: int) -> None:
    """The last column of a row in the second pool's part (gate and up), or in both parts' rows."""
    form, change, message = WRONG[number]
    layer = QuantisedLayer("_C", form, 300, 200, (1, 2), edges=False)
    layer.load()
    before = layer.unpacked()
    others = [
        sources.make(m.format, *m.shape, m.group, m.scale_type, seed=9) for m in layer.matrices
    ]
    row = 197 if form[0] != FP8_BLOCK else 128  # a block's scale shows at its first row
    for matrix, name in enumerate(("gate", "up", "down")):
        layer.matrices = [*others]
        layer.matrices[matrix] = copy.deepcopy(others[matrix])
        change(layer.matrices[matrix], row)
        with pytest.raises(ValueError, match=f"^expert slot 1, {name}" + message.format(row=row)):
            layer.load()
        for now, then in zip(layer.unpacked(), before, strict=True):
            np.testing.assert_array_equal(now, then)


def load_dense(layer: QuantisedLayer, dtype: int = 2) -> None:
    w = np.zeros(int(np.prod(layer.matrices[0].shape)), np.float32)
    layer.layer.load(1, *[sources.address_of(w)] * 3, dtypes=[dtype] * 3)


@pytest.mark.parametrize("form", [v for v in sources.VARIANTS if v[0] != INT4_GROUP], ids=str)
def test_dense_weights_for_quantised_formats_are_refused(form: Form) -> None:
    layer = QuantisedLayer("_C", form, 64, 64, (1,))
    layer.load()
    message = "slot 1, gate: the weights have no scales; this weight format accepts only quantised"
    if form[0] in ggml.GGML:
        message = "slot 1, gate: the weights are not ggml blocks; this weight format accepts only"
    with pytest.raises(ValueError, match=message):
        load_dense(layer)
    layer.check()


@pytest.mark.parametrize("scale_type", [BFLOAT16, FP32])
def test_dense_weights_get_fp16_scales_only(scale_type: int) -> None:
    layer = QuantisedLayer("_C", (INT4_GROUP, 32, scale_type), 64, 64, (1,))
    layer.load()
    with pytest.raises(ValueError, match="gate: dense weights are quantised with fp16 group"):
        load_dense(layer)
    layer.check()


def test_scales_for_dense_formats_are_refused() -> None:
    layer = core.Layer(("_C", "avx2"), BF16, 0)
    source = sources.make(FP8_ROW, 96, 64)
    with pytest.raises(ValueError, match="gate: the weights have scales; this weight format"):
        layer.layer.load(1, *[source.address] * 3)


@pytest.mark.parametrize("form", [(core.BF16, 0, 0), *sources.SCALED_VARIANTS], ids=str)
def test_blocks_for_other_formats_are_refused(form: Form) -> None:
    format, group, scale_type = form
    layer = core.Layer(
        ("_C", "avx2"),
        format,
        group,
        hidden=256,
        inter=256,
        scale_type=scale_type if format else None,
    )
    source = ggml.make(ggml.Q4_K, 256, 256)
    needed = "dense bf16" if format == core.BF16 else "quantised weights"
    with pytest.raises(ValueError, match=f"gate: .* this weight format accepts only {needed}"):
        layer.layer.load(1, *[source.address] * 3)


def test_zero_points_are_needed() -> None:
    layer = QuantisedLayer("_C", (INT4_ZERO, 32, FP16), 64, 64, (1,))
    layer.load()
    before = layer.unpacked()
    layer.matrices[1].zero = None
    with pytest.raises(ValueError, match="up: zero points are missing; this weight format needs"):
        layer.load()
    for now, then in zip(layer.unpacked(), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize(("format", "limit"), [(core.INT8_ROW, 127), (core.INT4_ROW, 7)])
@pytest.mark.parametrize("below", range(12))
def test_the_largest_weights_stay_finite(format: int, limit: int, below: int) -> None:
    """Found by fuzzing: the scale's rounding made infinities of weights near float32's largest."""
    w = np.full((1, 64), np.finfo(np.float32).max)
    w.view(np.uint32)[:] -= below
    tile = core._C.pack(format, 0, 0, *w.shape, (w.ctypes.data, 0, 0, 1.0))
    with np.errstate(over="raise"):
        got = tile[0, :4].view(np.float32)[0] * np.float32(limit)
    np.testing.assert_allclose(got, w[0, 0], rtol=2**-22)
