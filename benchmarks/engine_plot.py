"""Plots results of engine.py to a PNG: speed over GPU memory.

    python benchmarks/engine_plot.py OUT.png RESULT.json [RESULT.json ...]

Each result has a row of panels: tokens/s of decoding, and of reading a prompt. Needs matplotlib
(its version is in constraints.txt).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from figures import draw_saved, plt, save_figure
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

MARKERS = {"stock": "s", "kt": "o", "offload": "X"}
PANELS = {"decode_tokens_s": ("decoding", "streams"), "prefill_tokens_s": ("prefill", "tokens")}

Row = dict[str, Any]


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """results: contents of the JSON files."""
    drawn = [(result, _rows(result)) for result in results]
    drawn = [(result, rows) for result, rows in drawn if rows]
    if not drawn:
        raise SystemExit("nothing to plot: no configuration was timed on a GPU")
    figure, axes = plt.subplots(
        len(drawn), 2, figsize=(14, 5.4 * len(drawn)), squeeze=False, layout="constrained"
    )
    for (result, rows), line in zip(drawn, axes, strict=True):
        for (key, (what, unit)), panel in zip(PANELS.items(), line, strict=True):
            _speeds(panel, rows, key, unit)
            panel.set_title(f"{result['engine']}, {what}, {result['method']}", loc="left")
        shape = result["shape"]
        line[1].set_title(
            f"{shape['name']}, {result['layers']} layers; {result['cpu']}",
            loc="right",
            fontsize=9,
            color="0.35",
        )
    save_figure(figure, path, dpi=130)


def _rows(result: dict[str, Any]) -> list[Row]:
    return [row for row in result["rows"] if "error" not in row and row["gpu_bytes"]]


def _speeds(axes: Axes, rows: list[Row], key: str, unit: str) -> None:
    names = list(rows[0][key])
    for number, name in enumerate(names):
        colour = f"C{number}"
        for row in (row for row in rows if name in row[key]):  # others were not timed
            kind = row["name"].split()[0]
            axes.plot(
                row["gpu_bytes"] / 2**30,
                row[key][name],
                MARKERS[kind],
                color=colour,
                markerfacecolor="none" if row.get("deferred") else colour,
            )
    for row in rows:
        axes.annotate(
            row["name"],
            (row["gpu_bytes"] / 2**30, max(row[key].values())),
            fontsize=7,
            xytext=(4, 4 + 9 * bool(row.get("deferred"))),
            textcoords="offset points",
        )
    axes.set_yscale("log")
    axes.set_xlim(0, 1.15 * max(row["gpu_bytes"] for row in rows) / 2**30)
    axes.set_xlabel("GPU memory, GB")
    axes.set_ylabel("tokens/s")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(
        handles=[Line2D([], [], color=f"C{i}", label=f"{n} {unit}") for i, n in enumerate(names)]
        + [Line2D([], [], color="0.3", marker=m, linestyle="", label=k) for k, m in MARKERS.items()]
        + [
            Line2D(
                [],
                [],
                color="0.3",
                marker="o",
                linestyle="",
                markerfacecolor="none",
                label="with deferral",
            )
        ],
        fontsize=8,
        frameon=False,
    )


def main(arguments: list[str]) -> None:
    draw_saved(plot, arguments, __doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
