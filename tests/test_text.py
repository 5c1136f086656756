"""How messages show numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kt_kernel.runtime.text import SIZES, lacking, shown_size
from kt_kernel.serving.option_table import find_option
from kt_kernel.serving.option_values import checked_value


def read(shown: str) -> int:
    size = checked_value(find_option("gpu_experts_memory"), shown)
    assert isinstance(size, int)
    return size


@pytest.mark.parametrize("shown", ["0.02MB", "1536MB", "1.1GB", "2GB", "79.15GB", "12345.67GB"])
def test_sizes_are_shown_as_they_were_given(shown: str) -> None:
    again = shown.replace("1536MB", "1.5GB")
    assert shown_size(read(shown)) == again == shown_size(read(shown), down=True)


@given(st.integers(2 << 20, 1 << 49))
def test_sizes_are_rounded_in_the_direction_that_helps(size: int) -> None:
    """What is needed is enough, and what is there is there."""
    unit = SIZES["GB" if size >= SIZES["GB"] else "MB"]
    assert size - 1 <= read(shown_size(size)) <= size + unit / 100
    assert size - unit / 100 <= read(shown_size(size, down=True)) <= size + 1


def test_experts_that_lack_something() -> None:
    alike = {3: ["gate", "up"], 4: ["gate", "up"], 5: [], 6: ["up"]}
    assert lacking(alike) == "3-4 (gate, up); 6 (up)"
    assert lacking({5: []}) == lacking({}) == ""
    other = lacking({expert: [str(expert)] for expert in range(11)})
    assert other.startswith("0 (0); ") and other.endswith("; 7 (7); and 3 more experts")
