"""How soon experts are used again."""

from __future__ import annotations

import numpy as np


def ages(routes: np.ndarray) -> np.ndarray:
    """For each use of an expert, the number of tokens since the layer used it last.

    routes: int [T, L, K], -1 for none. Returns int64 [uses], without the first use of each expert,
    in no particular order. 1 means that the token before used it, too.
    """
    tokens, layers, width = routes.shape
    time, layer, _ = np.broadcast_arrays(
        np.arange(tokens)[:, None, None], np.arange(layers)[None, :, None], routes
    )
    used = routes >= 0
    expert, time, layer = routes[used].astype(np.int64), time[used], layer[used]
    key = layer * (int(expert.max(initial=0)) + 1) + expert
    order = np.lexsort((time, key))
    same = key[order][1:] == key[order][:-1]
    return np.diff(time[order])[same]


def reuse(routes: np.ndarray, within: int) -> float:
    """The share of uses whose expert one of the ``within`` tokens before used, too.

    routes: as in `ages`; their first uses count as not repeated.
    """
    return float((ages(routes) <= within).sum() / max(1, (routes >= 0).sum()))
