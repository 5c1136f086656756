"""Saved results of speculative.py as a table for appendix.py."""

from __future__ import annotations

from typing import Any

from saved import Content
from table import grid


def speculative(content: Content) -> str:
    """Tokens/s without and with drafted tokens, by the share of hot experts."""
    rows = [row for row in content["rows"] if "error" not in row]
    lines = []
    for row in rows:
        plain = [one for one in rows if one["hot"] == row["hot"] and not one["drafted"]]
        if not row["drafted"] or not plain:
            continue
        before = plain[0]["rejected"]
        cells = [f"{rate:.0f}" for rate in (before, row["accepted"], row["rejected"])]
        cells += [f"{row['accepted'] / before:.2f}", f"{row['break_even']:.2f}"]
        lines.append((f"{_share(row['hot'])}, {row['drafted']} drafted", cells))
    columns = [
        "tokens/s without speculation",
        "drafted tokens accepted",
        "rejected",
        "accepted / without",
        "time of a pass",
    ]
    methods = " and ".join(sorted({row["method"] for row in rows if row["method"]}))
    head = (
        f"{content['engine_name']} {content['engine_version']}, {content['layers']} layers of "
        f"{content['shape']['name']}'s shape, cold experts in {methods}, one request, "
        f"{content['gpu']}. {content['prediction']}"
    )
    return f"{head}\n\n{grid('hot experts', columns, lines)}\n"


def _share(hot: Any) -> str:
    return "all (stock)" if hot is None else f"{hot:.0%}" if hot else "none"
