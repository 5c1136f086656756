"""The bytes that a forward pass keeps for its backward pass, see docs/fine-tuning.md."""

from __future__ import annotations

import pytest
from kernels.core import BF16, Layer, Variant

from .core_oracle import Trained, check

HIDDEN, INTER, TOP_K, RANK, TOKENS = 64, 96, 2, 24, 41


@pytest.mark.parametrize(
    ("training", "per_token"),
    [
        ({}, 2 * HIDDEN + 4 * TOP_K * INTER + 8 * TOP_K * RANK),
        ({"skip_lora_grads": True}, 2 * HIDDEN + 4 * TOP_K * INTER),
        (
            {"skip_lora_grads": True, "full_weight_grad": True},
            2 * HIDDEN + 4 * TOP_K * INTER,
        ),
        ({"recompute": True}, 2 * HIDDEN),
    ],
    ids=["lora", "skip lora", "full", "recompute"],
)
def test_formula(training, per_token):
    layer = Layer(Variant("_C", "avx2"), BF16, 0, 4, TOP_K, HIDDEN, INTER)
    made = Trained(layer, RANK, options=training)
    made.layer.free_spare()
    check(made, made.batch(TOKENS))
    assert made.layer.free_spare() == TOKENS * per_token
