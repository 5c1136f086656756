"""Dropout that is switched by pass, in the compiled layer."""

from __future__ import annotations

import numpy as np
import pytest
from kernels.core import BF16, Layer, Variant

from .core_oracle import Gradients, Trained, check, values_of


def made(**training) -> Trained:
    return Trained(Layer(Variant("_C", "avx2"), BF16, 0, 4, 2, 64, 96), 8, options=training)


def forward(one: Trained, batch, **how) -> np.ndarray:
    out = np.empty_like(batch.x)
    one.layer.forward(batch.x, batch.ids, batch.weights, out, seed=batch.seed, **how)
    return out


@pytest.mark.parametrize("recompute", [False, True])
def test_a_kept_pass_without_dropout(recompute):
    """As of a layer that has none, also in its backward pass."""
    plain, one = made(), made(dropout=0.4, recompute=recompute)
    batch = one.batch(9)
    out = forward(one, batch, save=True, drop=False)
    x, weights, grads = one.backward(batch)
    check(plain, batch, Gradients(values_of(out), values_of(x), weights, grads))
    check(one, batch)  # on by default in a pass that is kept


def test_a_pass_with_dropout_that_is_not_kept():
    one = made(dropout=0.4)
    batch = one.batch(9)
    kept = forward(one, batch, save=True)
    one.layer.drop_newest()
    np.testing.assert_array_equal(forward(one, batch, save=False, drop=True), kept)
    assert np.any(forward(one, batch, save=False) != kept)
    assert one.layer.pending == 0
