"""The demo model's held-out loss under every method: what quantisation and deferral cost.

docs/performance-tables.md has the whole tables, made by benchmarks/perplexity.py; here is a part of
the text.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.resources import files

import pytest

from kt_kernel.accuracy.loss import (
    decode_loss,
    load_model,
    prefill_loss,
    replace_experts,
    windows_of,
)

DEMO = files("kt_kernel") / "demo_model"
TOKENS = 4096  # of prefill
DECODED = 256


@cache
def loss(
    method: str | None, decode: bool = False, deferred: int = 0, scale_search: bool = False
) -> float:
    """Nats per byte; method None: transformers' own experts."""
    text = (DEMO / "heldout.txt").read_text()
    windows = windows_of(DEMO, text, 1024, DECODED if decode else TOKENS)
    model = load_model(DEMO)
    if method:
        replace_experts(
            model, DEMO, method, threads=2, max_deferred=deferred, scale_search=scale_search
        )
    return (decode_loss if decode else prefill_loss)(model, windows)


def change(loss_now: float, loss_before: float) -> float:
    """Relative change of perplexity."""
    return math.exp(loss_now - loss_before) - 1


def test_the_model_has_learned() -> None:
    # An untrained byte model has ln 256 = 5.5 nats; the recorded loss of the whole text is 0.89.
    assert 0.7 < loss(None) < 1.1


@pytest.mark.parametrize(
    "method,limit",
    [
        ("BF16", 0.002),
        ("AMXINT8", 0.01),
        ("INT4_G32", 0.03),
        ("INT4_G128", 0.03),
        ("AMXINT4", 0.05),
    ],
)
def test_methods_keep_the_loss(method: str, limit: float) -> None:
    assert abs(change(loss(method), loss(None))) < limit


def test_decode_gives_the_loss_of_prefill() -> None:
    decoded = loss("BF16", decode=True)
    assert decoded == pytest.approx(loss(None, decode=True), rel=2e-3)


def test_deferral_costs_little_at_one_and_much_at_all() -> None:
    exact = loss("BF16", decode=True)
    assert abs(change(loss("BF16", decode=True, deferred=1), exact)) < 0.02
    # The control: with all four deferred the model must get clearly worse.
    assert change(loss("BF16", decode=True, deferred=4), exact) > 0.05
