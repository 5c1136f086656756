"""Layers in training."""

from __future__ import annotations

from typing import Any

import numpy as np

from .case import Case
from .specs import Array, Flag, Number, Real, Some
from .things import EXPERTS, HIDDEN, INTER, TOKENS, TOP_K, Things

RANK = 4


def training_cases(t: Things) -> dict[str, list[Case]]:
    core = t.core
    sizes = [(HIDDEN, INTER), (HIDDEN, INTER), (INTER, HIDDEN)]
    shapes = [s for i, o in sizes for s in ((EXPERTS, RANK, i), (EXPERTS, o, RANK))]
    names = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")
    adapters = [Array(np.ones(shape, np.float32), exact=True) for shape in shapes]
    rows, room = (Array(np.ones((TOKENS, HIDDEN), np.uint16), exact=True) for _ in range(2))
    routes = dict(ids=Array(t.ids, exact=True), weights=Array(t.router, exact=True))
    seed = Number(0, 0, (1 << 64) - 1, True)

    def new(**given: Any) -> Any:
        made = core.SftLayer(t.layer, rank=RANK, scaling=1.0, **given)
        made.update_lora(*[a.good for a in adapters])
        return made

    layer, kept = new(), new(max_cache_depth=2)

    def kept_again() -> None:
        kept.clear()
        kept.forward(rows.good, t.ids, t.router, np.ones_like(rows.good), save=True, seed=0)

    def backward(**given: Any) -> None:
        kept_again()
        kept.backward(**given)

    def drop_newest() -> None:
        kept_again()
        kept.drop_newest()

    def submit(**given: Any) -> None:
        layer.submit_forward(**given).wait()

    forward = dict(x=rows, out=room, **routes, save=Flag(False), seed=seed, drop=Flag(True, True))
    return {
        "SftLayer()": [
            Case(
                core.SftLayer,
                layer=Some(t.layer),
                rank=Number(RANK, 1, 4096, True),
                scaling=Real(1.0, ()),
                dropout=Real(0.0, (-0.1, 1.0)),
                max_cache_depth=Number(1, 1, 1 << 20, True),
                recompute=Flag(False),
                skip_lora_grads=Flag(False),
                full_weight_grad=Flag(False),
                extra=[(dict(layer=t.new_layer()), ValueError)],
            ),
        ],
        "SftLayer.update_lora": [
            Case(layer.update_lora, **dict(zip(names, adapters, strict=True)))
        ],
        "SftLayer.forward": [Case(layer.forward, **forward)],
        "SftLayer.submit_forward": [Case(submit, **forward)],
        "SftLayer.backward": [
            Case(
                backward,
                grad_out=rows,
                grad_in=room,
                grad_weights=Array(np.ones((TOKENS, TOP_K), np.float32), exact=True),
                grads=adapters,
                extra=[(dict(grads=None), ValueError)],
            ),
        ],
        "SftLayer.all_finite": [
            Case(layer.all_finite, values=Array(values, free=(0, 1), flat=True, exact=True))
            for values in (np.ones((TOKENS, HIDDEN), kind) for kind in (np.float32, np.uint16))
        ],
        "SftLayer.drop_newest": [Case(drop_newest)],
        "SftLayer.clear": [Case(layer.clear)],
        "SftLayer.free_spare": [Case(core.SftLayer.free_spare)],
        "SftLayer.pending": [Case(lambda: layer.pending)],
        "SftLayer.pending_tokens": [Case(lambda: layer.pending_tokens)],
    }
