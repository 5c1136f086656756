"""4-bit integers with zero points, made of dense weights."""

from __future__ import annotations

import pytest
import torch

from kt_kernel.sft.quantise import quantise_asymmetric
from kt_kernel.testing.quantised import values_of


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_weight_is_within_half_a_step(per_row, dtype):
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(5, 96, generator=generator) + torch.linspace(-2, 2, 5)[:, None]
    weights[0] = 0.0
    weights[1, :32] = 3.0  # all the same sign
    weights = weights.to(dtype)
    matrix = quantise_asymmetric(weights, 32, per_row)
    assert matrix.scale.shape == matrix.zero.shape == (5, 3)
    w = weights.double()
    span = w if per_row else w.unflatten(1, (-1, 32))
    step = (
        span.amax(-1, keepdim=True).clamp(min=0) - span.amin(-1, keepdim=True).clamp(max=0)
    ) / 15
    most = step.expand(span.shape).reshape(w.shape) * 0.5
    # The zero point is rounded, so the ends of a range may lose half a step more.
    wrong = (values_of(matrix) - w).abs()
    assert (wrong <= 2 * most * 1.002 + 1e-6).all()
    assert (wrong <= most * 1.002 + 1e-6).double().mean() > 0.9
    assert not wrong[0].any()
    if per_row:
        assert (matrix.scale == matrix.scale[:, :1]).all()
        assert (matrix.zero == matrix.zero[:, :1]).all()


def test_zero_points_lose_less_than_none_on_shifted_weights():
    weights = torch.rand(8, 128, generator=torch.Generator().manual_seed(2)) + 0.5
    symmetric = (weights / (weights.abs().amax(1, keepdim=True) / 7)).round()
    symmetric = symmetric * weights.abs().amax(1, keepdim=True) / 7
    found = values_of(quantise_asymmetric(weights, 128)).float()
    assert (found - weights).norm() < 0.6 * (symmetric - weights).norm()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "gate of slot 1: the range of row 2 is not finite"),
        (float("inf"), "the range of row 2 is not finite"),
        (1e6, "the range of row 2 exceeds 15 . 65504"),
    ],
)
@pytest.mark.parametrize("per_row", [False, True])
def test_refused(value, text, per_row):
    weights = torch.zeros(4, 64)
    weights[2, 40] = value
    with pytest.raises(ValueError, match=text):
        quantise_asymmetric(weights, 32, per_row, "gate of slot 1")
