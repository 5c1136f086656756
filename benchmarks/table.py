"""Prints saved results as Markdown tables.

    python benchmarks/table.py RESULT.json ...

A cell is the share of t_min and, after a slash, the goal. It is bold if the goal is missed.
appendix.py makes docs/performance-tables.md from all saved results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from report import Row, goal_met, ratio_met, same_work
from training_table import training_tables

NOISE = 0.05


def markdown(content: dict[str, Any]) -> str:
    parts = [_heading(content)]
    if content["routine"] in ("pack", "load"):
        parts.append(_sources(content["rows"], content["routine"]))
    elif content["routine"] == "sft":
        parts += [grid(*one) for one in training_tables(content)]
    else:
        parts += _shares(content)
    if content["notes"]:
        parts.append("\n".join(f"- {note}" for note in content["notes"]))
    return "\n\n".join(parts) + "\n"


def _heading(content: dict[str, Any]) -> str:
    shape, ceilings = content["shape"], content["ceilings"][str(max(map(int, content["ceilings"])))]
    samples = ceilings["samples"]["dram_read"]
    units = dict.fromkeys(row["unit"] for row in content["rows"] if row["unit"])
    peaks = "".join(f", {unit} {ceilings[unit] / 1e12:.3g} T/s" for unit in units)
    return (
        f"{content['date'][:10]}, {content['cpu']}, {content['cpus']} CPUs, "
        f"{content['last_level_cache'] >> 20} MiB of last-level cache. {shape['name']}: "
        f"E={shape['experts']} H={shape['hidden']} I={shape['inter']} k={shape['top_k']}. "
        f"Ceilings: read {ceilings['dram_read'] / 1e9:.0f} GB/s (samples over the run "
        f"{min(samples) / 1e9:.0f} to {max(samples) / 1e9:.0f}), copy "
        f"{ceilings['dram_copy'] / 1e9:.0f} GB/s{peaks}."
    )


def engine_name(name: str) -> str:
    """As an engine's authors write it."""
    return {"vllm": "vLLM", "sglang": "SGLang"}[name]


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def machine_and_layer(content: dict[str, Any]) -> str:
    """A result of training: its machine, its layer and its date."""
    shape = content["shape"]
    tokens = f", T={content['tokens']}" if "tokens" in content else ""
    return (
        f"{content['cpu']}, {content['cpus']} CPUs, {content['threads']} threads, rank "
        f"{content['rank']}, E={shape['experts']} H={shape['hidden']} I={shape['inter']} "
        f"k={shape['top_k']}{tokens}. {content['date'][:10]}."
    )


def grid(corner: str, columns: Sequence[str], lines: Iterable[tuple[str, Sequence[str]]]) -> str:
    """A Markdown table. Each line is the name of a row and its cells."""
    head = [f"| {corner} | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    return "\n".join(head + [f"| {name} | " + " | ".join(cells) + " |" for name, cells in lines])


def _by_tokens(rows: list[Row], corner: str, cell: Callable[[Row], str]) -> str:
    """One line per method, one column per T."""
    tokens = sorted({row["tokens"] for row in rows})
    found = {(row["method"], row["tokens"]): cell(row) for row in rows}
    methods = dict.fromkeys(row["method"] for row in rows)
    lines = [(m, [found.get((m, t), "") for t in tokens]) for m in methods]
    return grid(corner, [f"T={t}" for t in tokens], lines)


def _met(text: str, goal: str, met: bool) -> str:
    return f"{text} / {goal}" if met else f"**{text} / {goal}**"


def _shares(content: dict[str, Any]) -> list[str]:
    routine, parts = content["routine"], []

    def share(row: Row) -> str:
        goal, met = goal_met(row, routine)
        text = f"{row['share']:.0%}"
        return text if goal is None else _met(text, f"{goal:.0%}", met)

    def time(row: Row) -> str:
        return f"{row['median_us']:.0f}" if row["median_us"] >= 100 else f"{row['median_us']:.1f}"

    def ratio(row: Row) -> str:
        goal, met = ratio_met(row)
        text = f"{row['times_faster_than_peer']:.2f}"
        return text if goal is None else _met(text, f"{goal:g}", met)

    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in content["rows"]:
        groups.setdefault((row["table"], row["threads"], row["package"]), []).append(row)
    for (table, threads, package), every in groups.items():
        rows = [row for row in every if not row["beside"]]
        name = "" if package == "kt_moe" else f"{package}, "
        title = f"{name}{table} kernels, {threads} threads"
        parts.append(_by_tokens(rows, f"{title}: share of t_min", share))
        parts.append(_by_tokens(rows, f"{title}: median, µs", time))
        compared = [row for row in rows if "times_faster_than_peer" in row]
        if compared:
            parts.append(_by_tokens(compared, f"{title}: times faster than kt-kernel 0.7.2", ratio))
        if routine == "layer" and package == "kt_moe":
            parts += _rising_cost(rows)
    return parts + _threads(content["rows"]) + _beside(content["rows"])


def _rising_cost(rows: list[Row]) -> list[str]:
    """Lists batches whose cost per token is higher than in a smaller batch, which should not
    occur."""
    found, least = [], dict[str, tuple[float, int]]()
    for row in sorted(rows, key=lambda row: row["tokens"]):
        cost = row["median_us"] / row["tokens"]
        before, tokens = least.get(row["method"], (cost, row["tokens"]))
        if cost > before * (1 + NOISE):
            found.append(
                f"{row['method']} T={row['tokens']} {cost / before - 1:+.0%} over T={tokens}"
            )
        if cost <= before:
            least[row["method"]] = (cost, row["tokens"])
    return (
        ["A token costs more than in a smaller batch: " + ", ".join(found) + "."] if found else []
    )


def _threads(rows: list[Row]) -> list[str]:
    """Time by thread count, relative to the best count."""
    by_work: dict[tuple[str, str, int], dict[int, float]] = {}
    for row in rows:
        if row["package"] == "kt_moe" and not row["beside"] and "layers" in row:
            work = row["table"], row["method"], row["tokens"]
            by_work.setdefault(work, {})[row["threads"]] = row["median_us"]
    counts = sorted({count for times in by_work.values() for count in times})
    if len(counts) < 2:
        return []
    lines = []
    for (table, method, tokens), times in by_work.items():
        best = min(times.values())
        cells = [f"{times[n] / best - 1:+.0%}" if n in times else "" for n in counts]
        lines.append((f"{method} {table} T={tokens}", cells))
    return [grid("time against the best count", [f"{n} threads" for n in counts], lines)]


def _beside(rows: list[Row]) -> list[str]:
    alone = {same_work(r): r for r in rows if r["package"] == "kt_moe" and not r["beside"]}
    lines = []
    for row in rows:
        if row["beside"] and same_work(row) in alone:
            cells = [
                row["beside"],
                f"{row['median_us'] / alone[same_work(row)]['median_us']:.2f}",
                f"{row['share_of_fair']:.0%}" if "share_of_fair" in row else "",
            ]
            name = f"{row['method']} {row['table']} {row['threads']} threads T={row['tokens']}"
            lines.append((name, cells))
    columns = ["beside", "time against alone", "speed of the fair share"]
    return [grid("layer", columns, lines)] if lines else []


def _sources(rows: list[Row], routine: str) -> str:
    lines = []
    for row in rows:
        seconds = row["median_us"] / 1e6
        goal, met = goal_met(row, routine)
        share = f"{row['share']:.0%}"
        cells = [
            f"{row['source_bytes'] / seconds / 1e9:.1f}",
            f"{seconds / row['source_bytes'] * 1e9:.3f}",
            share if goal is None else _met(share, f"{goal:.0%}", met),
            f"{row['packed_bytes_per_weight']:.3f}",
        ]
        if "anonymous_bytes" in row:
            cells.append(f"{row['anonymous_bytes'] / row['packed_bytes']:.2f}")
        what = [row["method"], f"{row['threads']} threads"]
        if "cache" in row:
            what[1:1] = [f"from {row['source']}", row["cache"]]
        lines.append((", ".join(what), cells))
    columns = ["GB/s of source", "s per GB", "share of copy bandwidth", "packed bytes/weight"]
    if routine == "load":
        columns.append("anonymous memory / packed size")
    return grid(f"{routine}ing", columns, lines)


def main(arguments: list[str]) -> None:
    if not arguments:
        raise SystemExit(__doc__)
    for name in arguments:
        print(markdown(json.loads(Path(name).read_text())))


if __name__ == "__main__":
    main(sys.argv[1:])
