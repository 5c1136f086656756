"""The rows of kernels/include/kt/format.h: what Python is told suffices to unpack every format, and
a slip in a row does not compile."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kt_kernel import _C
from kt_kernel.testing import quantise_weights

from . import core, sources
from .compiling import KERNELS, missing
from .sources import FP16, Bytes, Doubles

ROWS = {row["id"]: row for row in _C.weight_formats}
DENSE = {"BF16": "BF16", "INT8_ROW": "AMXINT8", "INT4_ROW": "AMXINT4", "INT4_GROUP": "INT4_G32"}


class Unpacker:
    """Unpacks tiles by nothing but the row of their format, as a kernel on a GPU would."""

    def __init__(self, row: dict[str, Any], group: int, scale_type: int, columns: int) -> None:
        self.row, self.columns = row, columns
        self.block = row["block_columns"] or group
        self.blocks = -(-columns // self.block)
        self.scale_type = scale_type
        grouped = row["scale_kind"] == "group"
        self.scale_bytes = row["block_scale_bytes"] + grouped * 32 * (4 if scale_type == 2 else 2)
        self.head_bytes = row["head_bytes"]
        if row["scale_kind"] == "block":
            self.head_bytes = -(-columns // (128 * 16)) * 64  # 16 float32 in 64 bytes

    def tile(self, tile: Bytes) -> Doubles:
        """W [32, columns]."""
        head = tile[: self.head_bytes]
        blocks = tile[self.head_bytes :].reshape(self.blocks, -1)
        scales, steps = blocks[:, : self.scale_bytes], blocks[:, self.scale_bytes :]
        values = self.weights(head, scales, self.values(steps))
        return values.transpose(1, 0, 2).reshape(32, -1)[:, : self.columns]

    def values(self, steps: Bytes) -> Doubles:
        """The codes' values, [blocks, 32, columns of a block]."""
        row = self.row
        if row["code_type"] == "bf16":
            pairs = np.ascontiguousarray(steps).view(np.uint16).reshape(self.blocks, -1, 32, 2)
            return sources.bf16_values(pairs.swapaxes(1, 2).reshape(self.blocks, 32, -1))
        parts = steps.reshape(self.blocks, -1, row["bits"], 32, 4)  # of 32 columns
        codes = np.zeros((self.blocks, parts.shape[1], 32, 32), np.uint8)  # [.., column, row]
        low = 0
        for bits in row["planes"]:
            for step in range(bits):
                for quad in range(8 // bits):
                    column = 4 * (step * (8 // bits) + quad)
                    found = parts[:, :, low + step] >> np.uint8(quad * bits) & ((1 << bits) - 1)
                    for byte, offset in enumerate(row["byte_order"]):
                        codes[:, :, column + offset] |= found[..., byte] << np.uint8(low)
            low += bits
        values = np.array(row["code_values"])[codes]
        return values.transpose(0, 3, 1, 2).reshape(self.blocks, 32, self.block)

    def weights(self, head: Bytes, scales: Bytes, values: Doubles) -> Doubles:
        kind, cols = self.row["scale_kind"], self.row["scale_columns"]
        if kind == "none":
            return values
        if kind == "row":
            return values * floats(head[:128])[:, None]
        if kind == "block":
            of_columns = np.repeat(floats(head), 128)[: self.blocks * self.block]
            return values * of_columns.reshape(self.blocks, 1, self.block)
        if kind == "group":
            size = 4 if self.scale_type == 2 else 2
            scale = floats(scales[:, : 32 * size], self.scale_type)
            if self.row["zero_points"]:
                values = values - scales[:, 32 * size : 32 * size + 32, None]
            return values * scale[:, :, None]
        if kind == "ggml":
            return self.ggml_weights(scales, values)
        table = sources.E8M0 if kind == "ue8m0" else sources.E4M3
        scale = table[scales].reshape(self.blocks, -1, 32).swapaxes(1, 2)
        whole = floats(head[:4])[0] if kind == "e4m3" else 1
        return values * np.repeat(scale, cols, axis=2) * whole

    def ggml_weights(self, scales: Bytes, values: Doubles) -> Doubles:
        row, cols = self.row, self.row["scale_columns"]
        halves = floats(scales[:, : 128 if row["minimum"] else 64], 0).reshape(self.blocks, -1, 32)
        d = halves[:, 0, :, None]
        m = halves[:, 1, :, None] if row["minimum"] else 0
        if not cols:
            return d * values + m
        sub = scales[:, halves.shape[1] * 64 :].reshape(self.blocks, self.block // cols, -1, 32)
        if not row["minimum"]:
            s, t = sub[:, :, 0].view(np.int8), np.zeros(sub[:, :, 0].shape)
        elif row["scale_bits"] == 4:
            s, t = sub[:, :, 0] & 15, sub[:, :, 0] >> 4
        else:
            s, t = sub[:, :, 0], sub[:, :, 1]
        s, t = (np.repeat(x.astype(float).swapaxes(1, 2), cols, axis=2) for x in (s, t))
        return d * s * values - m * t


def floats(data: Bytes, scale_type: int = 2) -> Doubles:
    types = (np.float16, np.uint16, np.float32)
    return sources.scale_values(np.ascontiguousarray(data).view(types[scale_type]), scale_type)


def check(format: int, group: int, scale_type: int, tiles: Bytes, values: Doubles) -> None:
    unpacker = Unpacker(ROWS[format], group, scale_type, values.shape[1])
    found = np.concatenate([unpacker.tile(tile) for tile in tiles])[: len(values)]
    np.testing.assert_array_equal(found.astype(np.float32), values.astype(np.float32))


@pytest.mark.parametrize("variant", sources.VARIANTS, ids=str)
def test_rows_suffice_to_unpack(variant: tuple[int, int, int]) -> None:
    format, group, scale_type = variant
    unit = sources.column_unit(format, group)
    source = sources.make(*variant[:1], 75, 3 * unit if unit > 1 else 300, group, scale_type)
    check(*variant, _C.pack(*variant, *source.shape, source.address), source.values)


@pytest.mark.parametrize("name", DENSE)
def test_rows_suffice_to_unpack_what_was_quantised(name: str) -> None:
    (row,) = (row for row in _C.weight_formats if row["name"] == name)
    assert row["from_dense"]
    w = np.random.default_rng(0).standard_normal((75, 160)).astype(np.float32)
    form = (row["id"], 32 if row["scale_kind"] == "group" else 0, FP16)
    tiles = _C.pack(*form, *w.shape, sources.address_of(w), sources.FP32)
    check(*form, tiles, quantise_weights(DENSE[name], torch.from_numpy(w)).numpy())


def test_every_format_is_unpacked_here() -> None:
    unpacked = {variant[0] for variant in sources.VARIANTS}
    assert unpacked | {i for i, row in ROWS.items() if row["name"] in DENSE} == ROWS.keys()
    dense = {row["name"] for row in _C.weight_formats if row["from_dense"]}
    assert dense == DENSE.keys() == {ROWS[f.code]["name"] for f in core.DENSE}


def test_column_units() -> None:
    for format, row in ROWS.items():
        group = 32 if row["scale_kind"] == "group" else 0
        assert row["column_unit"] == sources.column_unit(format, group)


ROW = r"    \{\.format = WeightFormat::%s,.*?\},\n(?=    [\{g]|\};)"
SLIPS = {
    "no row": ("one row per format", ROW % "kIQ4XS", ""),
    "order": ("rows in the order", f"({ROW % 'kQ4_1'})({ROW % 'kQ5_0'})", r"\2\1"),
    "name": ("the names", r'"Q5_1"', '"Q5_0"'),
    "title": ("the names", "FP8 with row scales", "int8 with row scales"),
    "bits": ("the codes", r"kE2m1, \.bits = 4", "kE2m1, .bits = 8"),
    "offset": ("the codes", r"\.offset = 16", ".offset = 32"),
    "codes of ggml": ("the codes", r"kIq4, \.bits = 4(.*?)kGgml", r"kIq4, .bits = 4\1kRow"),
    "codes without scales": ("the scales", r"kBlock\}", "kNone}"),
    "columns of a scale": ("the scales", r"\.cols = 16\}", ".cols = 24}"),
    "scales of a block": ("the scales", r"kUe8m0, \.cols = 32", "kUe8m0, .cols = 16"),
    "bits of a scale": ("the scales", r"\.bits = 6\}", ".bits = 4}"),
    "sums": ("the scales", r"(kE4m3, .bits = 8.*?)kRow\}", r"\1kRow, .sums = true}"),
    "zero points": ("the scales", r"kRow\}", "kRow, .zero = true}"),
    "no minimum": ("the bytes", r", \.minimum = true", ""),
    "bytes in a file": ("the bytes", r"\.file_bytes = 144", ".file_bytes = 145"),
    "quantised here": ("the sources", r"(kUe8m0.*?64)\}", r"\1, .from_dense = true}"),
}
KERNEL_SLIPS = {
    "no row": ("one row of kernels per format", ROW % "kFp8Row", ""),
    "order": ("rows of kernels in the", f"({ROW % 'kFp8Block'})({ROW % 'kFp8Row'})", r"\2\1"),
    "no rows of this instruction set": ("rows of kernels in the", r", \.avx2 = 8\}", "}"),
    "no kernel": ("uninitialized reference", r" *\.gemv = vector_kernel<Int8Block>,\n", ""),
}


def check_slip(
    file: Path, source: Path, flags: list[str], slip: tuple[str, str, str] | None
) -> None:
    """The source compiles as it is, but not with a slip in the file: what the compiler says, the
    text where the slip is made, and what replaces it."""
    if shutil.which("g++") is None:
        missing("no g++ to compile with")
    if slip is not None:
        text, count = re.subn(*slip[1:], file.read_text(), count=1, flags=re.DOTALL)
        assert count == 1
        file.write_text(text)
    command = ["g++", "-std=c++20", "-fsyntax-only", *flags, "-x", "c++", source]
    result = subprocess.run(command, capture_output=True, text=True)
    errors = re.findall(r"error: (.*)", result.stderr)
    assert (result.returncode == 0) == (slip is None), result.stderr
    assert slip is None or any(slip[0] in error for error in errors), result.stderr


@pytest.mark.parametrize("slip", [None, *SLIPS])
def test_a_slip_does_not_compile(slip: str | None, tmp_path: Path) -> None:
    file = Path(shutil.copy(KERNELS / "include" / "kt" / "format.h", tmp_path))
    check_slip(file, file, [], SLIPS.get(slip))


@pytest.mark.parametrize("slip", [None, *KERNEL_SLIPS])
def test_a_slip_in_the_kernels_does_not_compile(slip: str | None, tmp_path: Path) -> None:
    folder = shutil.copytree(KERNELS / "isa", tmp_path / "isa")
    # With the sanitizer the compiler takes fewer expressions for constants.
    flags = ["-mavx2", "-mfma", "-mf16c", "-mbmi2", "-fsanitize=undefined", f"-I{KERNELS}/include"]
    check_slip(folder / "formats.inl", folder / "avx2.cpp", flags, KERNEL_SLIPS.get(slip))
