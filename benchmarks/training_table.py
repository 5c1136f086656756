"""Saved results of routine "sft" as Markdown tables; table.py and appendix.py use it."""

from __future__ import annotations

from typing import Any

from training import Row, training_goals


def training_tables(
    content: dict[str, Any],
) -> list[tuple[str, list[str], list[tuple[str, list[str]]]]]:
    """(corner, columns, lines) of a table for each rank."""
    rows = content["rows"]
    of_part = {
        part: {_key(r): r for r in rows if r["part"] == part} for part in ("forward", "backward")
    }
    tables = []
    for rank, table, threads in dict.fromkeys((r["rank"], r["table"], r["threads"]) for r in rows):
        lines = []
        for row in rows:
            if (row["rank"], row["table"], row["threads"], row["part"]) != (
                rank,
                table,
                threads,
                "step",
            ):
                continue
            backward = of_part["backward"][_key(row)]
            cells = [
                f"{row['tokens_s']:.0f}",
                f"{row['share']:.0%}",
                _figure(row, "times_faster_than_peft"),
                _figure(row, "times_faster_than_peer"),
                _figure(backward, "times_forward"),
                f"{row['peak_bytes'] / 2**30:.2f}",
                _figure(row, "memory_over_peft"),
            ]
            package = {"kt_moe": "", "peft": "PEFT, "}.get(row["package"], f"{row['package']}, ")
            lines.append((f"{package}{row['method']}, T={row['tokens']}", cells))
        columns = [
            "tokens/s",
            "share of t_min",
            "times PEFT's fastest",
            "times kt-kernel",
            "backward / forward",
            "peak GB",
            "peak / PEFT's fastest",
        ]
        used = [i for i in range(len(columns)) if any(cells[i] for _, cells in lines)]
        lines = [(name, [cells[i] for i in used]) for name, cells in lines]
        columns = [columns[i] for i in used]
        tables.append((f"rank {rank}, {table} kernels, {threads} threads", columns, lines))
    return tables


def _figure(row: Row, name: str) -> str:
    """The figure and its goal, bold where it is missed."""
    if name not in row:
        return ""
    text = f"{row[name]:.2f}"
    goal, met = training_goals(row).get(name, (None, True))
    if goal is not None:
        text += f" / {goal:g}"
    return text if met else f"**{text}**"


def _key(row: Row) -> tuple[Any, ...]:
    return row["package"], row["method"], row["table"], row["threads"], row["rank"], row["tokens"]
