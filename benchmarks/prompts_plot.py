"""Plots a result of prompts.py to a PNG: milliseconds to the first token over a prompt's length.

    python benchmarks/prompts_plot.py OUT.png RESULT.json [RESULT.json ...]

Each configuration without hot experts has a panel. Needs matplotlib (its version is in
constraints.txt).
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

from figures import draw_saved, plt, save_figure
from matplotlib.axes import Axes
from stream_modes import CPU, NO_COPIES, SHARED, STREAMED

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
LINES = {
    CPU: ("CPU alone", "C3", "o-"),
    STREAMED: ("all experts streamed", "C0", "s-"),
    SHARED: ("kt-moe: shared", "C2", "D-"),
    NO_COPIES: ("GPU alone, without copies", "0.6", ":"),
}


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """results: contents of the JSON files."""
    drawn = [
        (result, row)
        for result in results
        for row in result["rows"]
        if not row["hot"] and len(row["prompts"]) > 1
    ]
    if not drawn:
        raise SystemExit("nothing to plot: no configuration has two lengths of prompts")
    figure, axes = plt.subplots(
        1, len(drawn), figsize=(6 * len(drawn), 5), squeeze=False, layout="constrained"
    )
    for panel, (result, row) in zip(axes[0], drawn, strict=True):
        _draw(panel, row)
        engine, shape = ENGINES[result["engine"]], result["shape"]["name"]
        title = f"{row['method']}, no expert hot: {engine}, {result['layers']} layers of {shape}"
        panel.set_title(title, fontsize=10)
    save_figure(figure, path, dpi=110)


def _draw(panel: Axes, row: dict[str, Any]) -> None:
    lengths = sorted(map(int, row["prompts"]))
    for mode, (label, colour, style) in LINES.items():
        points = [
            (n, 1e3 * median(row["prompts"][str(n)][mode]["seconds"]))
            for n in lengths
            if mode in row["prompts"][str(n)]
        ]
        if points:
            panel.plot(*zip(*points, strict=True), style, color=colour, label=label)
    bus = row.get("rates", {}).get("bus_seconds")
    if bus:
        panel.axhline(1e3 * bus, color="C0", linestyle="--", linewidth=1, label="the copies alone")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(lengths, [f"{n:,}" for n in lengths])
    panel.set_xlabel("tokens of the prompt")
    panel.set_ylabel("ms to the first token")
    panel.grid(True, which="both", alpha=0.3)
    panel.legend(fontsize=8)


def main(arguments: list[str]) -> None:
    draw_saved(plot, arguments, __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
