"""The search for values that are not finite, by the threads of a layer."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.core import BF16, Format, Variant

from .test_core import SHAPES, trained

BAD = {np.float32: (np.nan, np.inf, -np.inf), np.uint16: (0x7FC0, 0x7F80, 0xFF80, 0x7F81)}


@pytest.fixture(scope="module")
def layer():
    return trained(Variant("_C", "avx2"), Format(BF16), SHAPES[0], threads=(3,)).layer


@pytest.mark.parametrize("dtype", BAD)
@pytest.mark.parametrize("shape", [(1,), (7, 5), (70001,)])
def test_a_single_value_is_found_wherever_it_is(layer, dtype, shape):
    values = np.full(shape, 0x7F7F if dtype is np.uint16 else 3.4e38, dtype)  # whose sum overflows
    assert layer.all_finite(values)
    for place in {0, values.size // 3, values.size - 1}:
        for bad in BAD[dtype]:
            changed = values.copy()
            changed.flat[place] = bad
            assert not layer.all_finite(changed)


def test_what_is_no_array_of_floats(layer):
    assert layer.all_finite(np.zeros((0, 4), np.float32))
    with pytest.raises(ValueError, match="float32, or uint16"):
        layer.all_finite(np.zeros(3, np.float64))
    with pytest.raises(TypeError):
        layer.all_finite(np.zeros((4, 4), np.float32)[:, ::2])
