"""Results of the first version of run.py as tables for appendix.py."""

from __future__ import annotations

from saved import Content
from table import grid


def early(content: Content) -> str:
    """Results of the first version of run.py, which saved fewer fields."""
    parts = [
        f"{content['cpu']}, {content['threads']} threads, {content['layers']} layers of "
        f"{content['shape']}'s shape. "
        f"Read bandwidth {content['ceilings']['dram_read'] / 1e9:.0f} GB/s."
    ]
    for table in dict.fromkeys(row["table"] for row in content["rows"]):
        rows = [row for row in content["rows"] if row["table"] == table]
        tokens = sorted({row["tokens"] for row in rows})
        share = {(row["method"], row["tokens"]): f"{row['share']:.0%}" for row in rows}
        methods = dict.fromkeys(row["method"] for row in rows)
        lines = [(name, [share.get((name, t), "") for t in tokens]) for name in methods]
        parts.append(grid(f"{table}: share of t_min", [f"T={t}" for t in tokens], lines))
    return "\n\n".join(parts)
