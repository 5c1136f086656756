"""Random routes with a given locality, where no record of a model is at hand.

Each layer selects its experts independently. An expert's chance depends on how popular it is, in
general and in the current topic, and on how long ago it was used. ``K`` experts are drawn without
replacement: the largest sums of the logarithm of their weights and a Gumbel variable.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .model import RoutedModel
from .record import RouteRecord


@dataclass(frozen=True)
class Locality:
    """Parameters of a generator.

    Attributes:
        experts, per_token: E and K.
        popularity, topic: standard deviations of the log-weights that an expert always has, and
            that it has in one topic.
        topic_tokens: tokens after which the topic changes.
        last: added to the log-weight of the experts that the last token used.
        recent: added to that of experts used before that; it falls by a factor of e in `fading`
            tokens.
    """

    experts: int
    per_token: int
    popularity: float
    topic: float
    topic_tokens: int
    last: float
    recent: float
    fading: float


# Fitted to published measurements of decoding; tests/routes/test_synthetic.py states them.
QWEN3_30B = Locality(128, 8, 0.11, 0.3, 100, 0.72, 3.3, 20.0)
MANY_EXPERTS = Locality(512, 10, 0.18, 0.1, 400, 1.45, 3.1, 40.0)
WEAK = Locality(256, 6, 1.0, 0.3, 2000, 0.3, 0.2, 20.0)
NONE = Locality(128, 8, 0.0, 0.0, 1000, 0.0, 0.0, 1.0)
LOCALITIES = {"qwen3-30b": QWEN3_30B, "many-experts": MANY_EXPERTS, "weak": WEAK, "none": NONE}


def generate(locality: Locality, tokens: int, layers: int, seed: int = 0) -> RouteRecord:
    """Routes of ``tokens`` decoded tokens, each in its own pass. The same seed gives the same."""
    p = locality
    rng = np.random.default_rng(seed)
    shape = layers, p.experts
    always = rng.normal(0, p.popularity, shape)
    routes = np.empty((tokens, layers, p.per_token), np.int16)
    last_used = np.full(shape, -np.inf)
    rows = np.arange(layers)[:, None]
    for token in range(tokens):
        if token % p.topic_tokens == 0:
            weights = always + rng.normal(0, p.topic, shape)
        age = token - last_used
        logits = weights + p.recent * np.exp((1 - age) / p.fading) + p.last * (age == 1)
        noisy = logits + rng.gumbel(size=shape)
        best = np.argpartition(-noisy, p.per_token - 1, axis=1)[:, : p.per_token]
        order = np.argsort(-np.take_along_axis(noisy, best, axis=1), axis=1)
        routes[token] = np.take_along_axis(best, order, axis=1)
        last_used[rows, routes[token]] = token
    model = RoutedModel(
        model_type="synthetic",
        num_hidden_layers=layers,
        num_experts=p.experts,
        num_experts_per_tok=p.per_token,
        hidden_size=0,
        moe_intermediate_size=0,
    )
    return RouteRecord(model, tuple(range(layers)), routes, np.arange(tokens, dtype=np.int64))
