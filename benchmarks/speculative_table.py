"""The table of speculative.py's results."""

from __future__ import annotations

from saved import Content
from table import grid

ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}


def speculative(content: Content) -> str:
    """Tokens/s by the number of hot experts and of drafted tokens, and the break-even."""
    shape = content["shape"]
    lines = []
    for row in content["rows"]:
        drafted = f"{row['drafted']} drafted" if row["drafted"] else "none drafted"
        name = f"{row['hot']:.0%} hot, {drafted}"
        even = f"{row['break_even']:.2f}" if "break_even" in row else ""
        lines.append((name, [f"{row['rejected']:.0f}", f"{row['accepted']:.0f}", even]))
    head = (
        f"{ENGINES[content['engine']]} {content['engine_version']} on an {content['gpu']} and an "
        f"{content['cpu']} with {content['cpus']} CPUs, {content['layers']} layers of "
        f"{shape['name']}'s shape (E={shape['experts']} H={shape['hidden']} I={shape['inter']} "
        f"k={shape['top_k']}), method {content['rows'][0]['method']}, one stream.\n\n"
    )
    return head + grid("tokens/s", ["all rejected", "all accepted", "break-even"], lines)
