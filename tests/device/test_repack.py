"""Packed weights become an engine's codes and scales, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from kernels.repacking import FORMS, check_repacked

from kt_kernel.weights.formats import WeightForm

pytest.importorskip("triton")


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(64, 128), (33, 640)])
def test_the_same_codes_and_scales(form: WeightForm, rows: int, columns: int) -> None:
    check_repacked(form, rows, columns, "cpu")


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2]], ids=str)
def test_scales_rounded_to_bfloat16(form: WeightForm) -> None:
    check_repacked(form, 32, 256, "cpu", torch.bfloat16)


def test_blocks_of_rows() -> None:
    """Scales of FP8 stand for 128 rows, which are four tiles."""
    check_repacked(FORMS[-1], 288, 256, "cpu")
