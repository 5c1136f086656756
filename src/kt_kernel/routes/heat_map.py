"""Shows how evenly the experts of a model are used, as text."""

from __future__ import annotations

import numpy as np

from .statistics import ExpertStatistics

_SHADES = " ░▒▓█"
# Shades end at these multiples of an even use of all experts.
_LIMITS = (0.25, 0.75, 1.5, 3.0)


def heat_map(statistics: ExpertStatistics, columns: int = 64) -> str:
    """A line for each layer: its experts in order, brighter where they were used more, and two
    numbers. Neighbouring experts share a character if there are more than ``columns``."""
    counts = statistics.counts
    layers, experts = counts.shape
    together = -(-experts // columns)
    even = counts.mean(axis=1, keepdims=True)
    relative = np.divide(counts, even, out=np.zeros_like(counts), where=even > 0)
    padded = np.full((layers, -(-experts // together) * together), np.nan)
    padded[:, :experts] = relative
    cells = np.nanmean(padded.reshape(layers, -1, together), axis=2)
    shades = np.asarray(np.digitize(cells, _LIMITS))
    each = "an expert" if together == 1 else f"the mean of {together} experts"
    lines = [
        f"{statistics.model.describe()}: {statistics.tokens.max():,.0f} tokens",
        f"A character is {each}; with the mean of a layer at 1: "
        + ", ".join(
            f"'{shade}' {limit}"
            for shade, limit in zip(
                _SHADES,
                ("below 0.25", "below 0.75", "below 1.5", "below 3", "3 and more"),
                strict=True,
            )
        ),
        "The last columns: how many experts have half of the uses, and how many have none.",
        f"layer  {'':{cells.shape[1]}}  half  none",
    ]
    for layer, row, count in zip(statistics.layers, shades, counts, strict=True):
        picture = "".join(_SHADES[shade] for shade in row)
        half, none = experts_for(count, 0.5), int((count == 0).sum())
        lines.append(f"{layer:5}  {picture}  {half:4}  {none:4}")
    return "\n".join(lines)


def experts_for(counts: np.ndarray, share: float) -> int:
    """How many experts [E], the most used ones first, have this share of the uses; 0 without
    uses."""
    total = counts.sum()
    if not total:
        return 0
    ordered = np.cumsum(np.sort(counts)[::-1])
    return int(np.searchsorted(ordered, share * total * (1 - 1e-12)) + 1)
