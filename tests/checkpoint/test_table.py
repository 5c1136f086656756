"""The page docs/formats.md is what the code's own tables make of it."""

from pathlib import Path

import pytest

from kt_kernel import _C
from kt_kernel.checkpoint import table
from kt_kernel.checkpoint.safetensors.families import FAMILIES
from kt_kernel.checkpoint.safetensors.formats import FORMATS
from kt_kernel.weights.formats import all_formats
from kt_kernel.weights.methods import INFERENCE_METHODS

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
TABLES = ["amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2"]


def test_the_page_is_up_to_date():
    if list(dict.fromkeys(kernel[0] for kernel in _C.kernels())) != TABLES:
        pytest.skip("the core was built for fewer instruction sets (KT_ISA)")
    found = PAGE.read_text()
    assert found == table.page(), f"{PAGE}: run python -m kt_kernel.checkpoint.table > {PAGE}"


def test_everything_is_in_it():
    rows = list(table.rows())
    assert {kind.title for kind in FORMATS} <= {row.source for row in rows}
    assert {method for row in rows for method in row.methods} == set(INFERENCE_METHODS)
    assert {format for row in rows for format in row.formats} == set(all_formats())
    for model_type in FAMILIES:
        assert f"`{model_type}`" in table.page()


def test_kernels():
    """Every table has kernels of every format; those that run here are among them."""
    kernels = _C.kernels()
    tables = dict.fromkeys(kernel[0] for kernel in kernels)
    assert len(kernels) == len(tables) * len(all_formats())
    assert set(_C.kernel_tables()) <= set(tables)
