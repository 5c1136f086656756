"""Pictures as PNG files. Needs matplotlib, which is imported when a function is called."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..runtime.figures import png_of
from ..runtime.files import need_writable, write_output
from .simulator import Result
from .statistics import ExpertStatistics

_COLOURS = [
    f"tab:{name}" for name in "blue orange green red purple brown pink gray olive cyan".split()
] + ["gold", "black"]


def plot_heat_map(statistics: ExpertStatistics, path: str | os.PathLike[str]) -> None:
    """Draws each expert's use, relative to the mean of its layer. ImportError without matplotlib,
    OSError if the file cannot be written."""
    figure_class = _figure_class()
    counts = statistics.counts
    even = counts.mean(axis=1, keepdims=True)
    relative = np.divide(counts, even, out=np.zeros_like(counts), where=even > 0)
    layers, experts = counts.shape
    figure = figure_class(figsize=(2 + experts / 16, 2 + layers / 8), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(relative, aspect="auto", interpolation="nearest", cmap="magma", vmin=0)
    axes.set_yticks(range(0, layers, max(1, layers // 16)))
    axes.set_yticklabels(statistics.layers[:: max(1, layers // 16)])
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    axes.set_title(f"{statistics.model.describe()}: {statistics.tokens.max():,.0f} tokens")
    figure.colorbar(image, label="uses / mean of the layer")
    write_output(path, png_of(figure, dpi=110))


def plot_policies(results: Mapping[str, Sequence[Result]], path: str | os.PathLike[str]) -> None:
    """Draws the hit rate over the number of slots: a panel for each record (the keys), a line for
    each policy, dashed for placements that never change. Raises what `plot_heat_map` raises."""
    figure_class = _figure_class()
    figure = figure_class(figsize=(3.6 * len(results) + 2.6, 4.2), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (title, found) in zip(panels, results.items(), strict=True):
        axes.set_prop_cycle(color=_COLOURS)
        for policy in dict.fromkeys(result.policy for result in found):
            line = sorted((r.slots, 100 * r.hit_rate) for r in found if r.policy == policy)
            fixed = not any(r.uploads for r in found if r.policy == policy)
            style = "--" if fixed else "-"
            axes.plot(*zip(*line, strict=True), style, marker="o", markersize=3, label=policy)
        axes.set_title(title)
        axes.set_xlabel("slots per layer")
        axes.set_ylim(0, 100)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("hit rate (%)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    write_output(path, png_of(figure, dpi=110))


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raises what drawing to this file would raise, before anything is computed for it: ImportError
    without matplotlib, OSError if the file cannot be written."""
    _figure_class()
    need_writable(path)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need matplotlib ({error}); install it with pip") from error
    return Figure
