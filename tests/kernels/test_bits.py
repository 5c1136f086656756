"""Results that must be equal to the last bit."""

from __future__ import annotations

import itertools

import numpy as np
from grid import grid

from . import core
from .core import (
    DENSE,
    INTEGER,
    KINDS,
    ONE_OF_EACH,
    TILE,
    VARIANTS,
    VECTOR,
    Format,
    Kind,
    Layer,
    Variant,
    formats,
)


@grid(variant=VARIANTS, format=ONE_OF_EACH, kind=KINDS)
def test_same_bits_for_any_threads(variant: Variant, format: Format, kind: Kind) -> None:
    outputs = []
    for threads in (1, 2, 3, 7):
        layer = Layer.of(
            variant, format, 5, 3, *format.fit(100, 200), kind=kind, threads=(threads,)
        )
        outputs.append(layer.forward(*layer.batch(37)))
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0], other)


@grid(variant=VARIANTS, format=ONE_OF_EACH, kind=[VECTOR, TILE])
def test_same_bits_for_any_batch(variant: Variant, format: Format, kind: Kind) -> None:
    layer = Layer.of(variant, format, 4, 2, *format.fit(100, 72), kind=kind, max_tokens=16)
    x, expert_ids, weights = layer.batch(40)
    whole = layer.forward(x, expert_ids, weights)
    for first, last in ((0, 1), (1, 4), (3, 20), (20, 40)):
        part = slice(first, last)
        np.testing.assert_array_equal(
            layer.forward(x[part], expert_ids[part], weights[part]), whole[part]
        )


@formats([f for f in DENSE if f.code in INTEGER])
def test_integer_formats_have_the_same_bits_everywhere(format: Format) -> None:
    """Integer accumulators are exact and the float operations after them the same."""
    outputs = {}
    for variant, kind in itertools.product(VARIANTS, KINDS):
        module = core.module(variant[0])
        if module is None or variant[1] not in module.kernel_tables():
            continue
        layer = Layer.of(variant, format, 4, 3, 130, 65, kind=kind)
        outputs[*variant, kind] = layer.forward(*layer.batch(23))
    first = next(iter(outputs.values()))
    for where, y in outputs.items():
        np.testing.assert_array_equal(y, first, err_msg=str(where))
