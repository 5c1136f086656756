"""Plots saved results to a PNG: the roofline with a curve per method, and shares of t_min over T.

    python benchmarks/plot.py OUT.png RESULT.json [RESULT.json ...]

Each kernel table has a row of panels. Needs matplotlib (its version is in constraints.txt).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from figures import draw_saved, plt, save_figure
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, PercentFormatter

STYLES = {  # method: colour, marker. A family of formats has one colour range.
    "BF16": ("#000000", "o"),
    "AMXINT8": ("#0b5fa5", "s"),
    "AMXINT4": ("#58a6e0", "s"),
    "INT4_G32": ("#1b7837", "^"),
    "INT4_G128": ("#7fbf7b", "^"),
    "RAWINT4": ("#a6761d", "v"),
    "GPTQ_INT4": ("#e6ab02", "v"),
    "FP8": ("#b2182b", "D"),
    "FP8_PERCHANNEL": ("#ef8a62", "D"),
    "MXFP8": ("#c51b7d", "P"),
    "MXFP4": ("#762a83", "X"),
    "NVFP4": ("#b39ad0", "X"),
}

Row = dict[str, Any]


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """results: contents of saved JSON files of the routines layer, gemv or gemm."""
    results = [r for r in results if any(row["unit"] for row in r["rows"])]
    panels = [(result, table) for result in results for table in _tables(result)]
    if not panels:
        raise SystemExit("nothing to plot: no rows of the routines layer, gemv or gemm")
    figure, axes = plt.subplots(
        len(panels), 2, figsize=(14, 5.4 * len(panels)), squeeze=False, layout="constrained"
    )
    for (result, table), (left, right) in zip(panels, axes, strict=True):
        rows = _rows(result, table)
        _roofline(left, rows)
        _shares(right, rows)
        shape = result["shape"]
        title = f"{result['routine']}, {table} kernels, {rows[0]['threads']} threads, "
        sizes = zip("EHIk", list(shape.values())[1:], strict=True)
        left.set_title(title + " ".join(f"{k}={v}" for k, v in sizes), loc="left")
        right.set_title(result["cpu"], loc="right", fontsize=9, color="0.35")
        right.legend(
            handles=_legend(rows), loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False
        )
    save_figure(figure, path, dpi=130)


def _tables(result: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["table"] for row in result["rows"]))


def _rows(result: dict[str, Any], table: str) -> list[Row]:
    """The rows of the largest thread count, without other work on the machine."""
    rows = [row for row in result["rows"] if row["table"] == table and not row["beside"]]
    most = max(row["threads"] for row in rows)
    return [row for row in rows if row["threads"] == most]


def _curves(rows: list[Row]) -> dict[tuple[str, bool], list[Row]]:
    """The rows by method and whether they are kt-kernel's, in ascending T."""
    curves: dict[tuple[str, bool], list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        curves.setdefault((row["method"], row["package"] != "kt_moe"), []).append(row)
    return curves


def _draw(axes: Axes, curves: dict[tuple[str, bool], list[Row]], x: Any, y: Any) -> None:
    for (method, peer), rows in curves.items():
        colour, marker = STYLES[method]
        axes.plot(
            [x(row) for row in rows],
            [y(row) for row in rows],
            color=colour,
            marker=marker,
            markersize=4.5,
            linewidth=1.0 if peer else 1.6,
            linestyle=":" if peer else "-",
            markerfacecolor="white" if peer else colour,
            zorder=3,
        )


def _intensity(row: Row) -> float:
    return row["tera_ops_s"] * 1e3 / row["gb_s"]  # operations per byte of weights


def _roofline(axes: Axes, rows: list[Row]) -> None:
    bandwidth = rows[0]["memory_ceiling"]
    units = {row["unit"]: row["unit_ceiling"] for row in rows}
    least = min(_intensity(row) for row in rows) / 1.6
    most = max(max(_intensity(row) for row in rows), max(units.values()) / bandwidth) * 3
    top = max(units.values())
    axes.plot([least, top / bandwidth], [least * bandwidth, top], color="0.45", linewidth=1.2)
    axes.annotate(
        f"read {bandwidth / 1e9:.0f} GB/s",
        (least * 1.15, least * 1.15 * bandwidth),
        xytext=(10, 0),
        textcoords="offset points",
        va="top",
        color="0.35",
        fontsize=9,
    )
    for place, (name, peak) in enumerate(sorted(units.items(), key=lambda unit: -unit[1])):
        axes.plot([peak / bandwidth, most], [peak, peak], color="0.45", linewidth=1.2)
        axes.annotate(  # the highest peak above its line, the others below
            f"{name} {peak / 1e12:.3g} T/s",
            (most, peak),
            xytext=(-3, 4 - 8 * (place > 0) - 12 * max(0, place - 1)),
            textcoords="offset points",
            ha="right",
            va="top" if place else "bottom",
            color="0.35",
            fontsize=9,
        )
    _draw(axes, _curves(rows), _intensity, lambda row: row["tera_ops_s"] * 1e12)
    axes.set(xscale="log", yscale="log", xlim=(least, most), ylim=(None, top * 2))
    axes.yaxis.set_major_formatter(FuncFormatter(_tera))
    axes.set_xlabel("operations per byte of weights")
    axes.set_ylabel("operations per second")
    axes.grid(True, which="major", color="0.9")


def _tera(value: float, _: Any) -> str:
    return f"{value / 1e12:g} T" if value >= 1e12 else f"{value / 1e9:g} G"


def _shares(axes: Axes, rows: list[Row]) -> None:
    _draw(axes, _curves(rows), lambda row: row["tokens"], lambda row: row["share"])
    tokens = sorted({row["tokens"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [str(t) for t in tokens])
    axes.minorticks_off()
    axes.axhline(1.0, color="0.45", linewidth=1.2)
    axes.set_ylim(0, max(1.08, 1.05 * max(row["share"] for row in rows)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("tokens T")
    axes.set_ylabel("share of what the ceilings allow")
    axes.grid(True, color="0.9")


def _legend(rows: list[Row]) -> list[Line2D]:
    curves = _curves(rows)
    entries = [
        Line2D([], [], color=STYLES[m][0], marker=STYLES[m][1], markersize=4.5, label=m)
        for m in STYLES
        if (m, False) in curves
    ]
    if any(peer for _, peer in curves):
        entries.append(
            Line2D(
                [],
                [],
                color="0.4",
                linestyle=":",
                marker="o",
                markersize=4.5,
                markerfacecolor="white",
                label="kt-kernel 0.7.2",
            )
        )
    return entries


if __name__ == "__main__":
    draw_saved(plot, sys.argv[1:], __doc__)
