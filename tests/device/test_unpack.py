"""Unpacking on the GPU, in Triton's interpreter, against the unpacker of the compiled core."""

from __future__ import annotations

import pytest
import torch
from grid import grid
from kernels.core import Format
from kernels.unpacking import ALL, BY_ID, Shape, check

pytest.importorskip("triton")

# Edges of scales make some weights infinite.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@grid(
    format=ALL,
    shape=[Shape(64, 96, 2), Shape(33, 300, 4), Shape(7, 100, 16)],
    dtype=[torch.bfloat16, torch.float16, torch.float32],
)
def test_same_bits_as_the_core(format: Format, shape: Shape, dtype: torch.dtype) -> None:
    check(format, shape, dtype, "cpu")


def test_every_format_is_unpacked() -> None:
    assert {format.code for format in ALL} == BY_ID.keys()
