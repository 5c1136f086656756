"""Converts measured lines to rows of JSON, and rows to printed tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from methods import goal_of, peer_goal_of
from rounds import Line
from training import training_goals

Row = dict[str, Any]


def row_of(line: Line, ceilings: dict[str, float]) -> Row:
    """A line's median, p10, p90 and best time, and its share of what the ceilings allow."""
    sample = torch.tensor(line.times, dtype=torch.float64)
    memory_time = line.bytes / ceilings[line.memory]
    unit_time = line.operations / ceilings[line.unit] if line.unit else 0.0
    unit_time += sum(n / ceilings[unit] for unit, n in line.other_operations.items())
    operations = line.operations + sum(line.other_operations.values())
    t_min, median = max(memory_time, unit_time), sample.quantile(0.5).item()
    return {
        **line.info,
        "samples": len(line.times),
        "rounds": line.rounds,
        "median_us": median * 1e6,
        "p10_us": sample.quantile(0.1).item() * 1e6,
        "p90_us": sample.quantile(0.9).item() * 1e6,
        "best_us": sample.min().item() * 1e6,
        "gb_s": line.bytes / median / 1e9,
        "tera_ops_s": operations / median / 1e12,
        "unit": line.unit,
        "memory": line.memory,
        "memory_ceiling": ceilings[line.memory],
        "unit_ceiling": ceilings[line.unit] if line.unit else None,
        "bound": "unit" if unit_time > memory_time else "memory",
        "t_min_us": t_min * 1e6,
        "share": t_min / median,
    }


def same_work(row: Row) -> tuple[Any, ...]:
    """A key that is equal for kt-moe's row and kt-kernel's row of the same work."""
    return tuple(row[key] for key in ("method", "table", "threads", "tokens"))


def add_ratios(rows: Iterable[Row]) -> None:
    """Adds to each row of kt-moe how many times as fast as kt-kernel it is, if that was
    measured."""
    rows = list(rows)
    theirs = {same_work(row): row for row in rows if row["package"] != "kt_moe"}
    for row in rows:
        peer = theirs.get(same_work(row))
        if peer and row["package"] == "kt_moe" and not row["beside"]:
            row["times_faster_than_peer"] = peer["median_us"] / row["median_us"]
            row["times_faster_by_best"] = peer["best_us"] / row["best_us"]


def goal_met(row: Row, routine: str) -> tuple[float | None, bool]:
    """The share that a row of kt-moe must reach (None: no goal), and whether it does."""
    goal = None
    if routine == "pack":
        goal = 0.5
    elif routine == "layer" and row["package"] == "kt_moe" and not row["beside"]:
        goal = goal_of(row["method"], row["table"], row["tokens"], row["tokens_per_expert"])
    return goal, goal is None or row["share"] >= goal


def ratio_met(row: Row) -> tuple[float | None, bool]:
    """How many times as fast as kt-kernel a row must be (None: no goal), and whether it is."""
    goal = peer_goal_of(row["method"], row["table"], row["tokens"])
    if goal is None or row["times_faster_than_peer"] >= goal:
        return goal, True
    return goal, row["table"] == "avx2" and row["share"] >= 0.85


def print_ceilings(content: dict[str, Any]) -> None:
    print(f"\n{content['cpu']}, {content['cpus']} CPUs")
    for threads, found in content["ceilings"].items():
        memory = ", ".join(
            f"{name} {found[name] / 1e9:.1f} GB/s ({min(s) / 1e9:.1f} to {max(s) / 1e9:.1f})"
            for name, s in found["samples"].items()
        )
        units = ", ".join(
            f"{name} {value / 1e12:.3g}"
            for name, value in found.items()
            if name != "samples" and name not in found["samples"]
        )
        print(f"ceilings with {threads} threads: {memory}; tera-operations/s: {units}")


def print_rows(rows: Iterable[Row], routine: str) -> None:
    if routine in ("pack", "load"):
        return _print_sources(rows, routine)
    if routine == "sft":
        return _print_training(rows)
    unit = "us a tile" if routine in ("gemv", "gemm") else "us"
    print(
        f"{'package':9} {'method':14} {'kernels':12} {'thr':>3} {'T':>5} {'median ' + unit:>16} "
        f"{'p10':>10} {'p90':>10} {'GB/s':>7} {'TOP/s':>7} {'bound':6} {'share':>6} goal"
    )
    for row in rows:
        goal, met = goal_met(row, routine)
        text = (
            f"{row['package'].split()[0]:9} {row['method']:14} {row['table']:12} "
            f"{row['threads']:3} {row['tokens']:5} {row['median_us']:16.1f} "
            f"{row['p10_us']:10.1f} {row['p90_us']:10.1f} {row['gb_s']:7.1f} "
            f"{row['tera_ops_s']:7.3f} {row['bound']:6} {row['share']:6.1%}"
        )
        if goal is not None:
            text += f" {'of' if met else 'BELOW'} {goal:.0%}"
        if "times_faster_than_peer" in row:
            goal, met = ratio_met(row)
            text += f"  {row['times_faster_than_peer']:.2f} times kt-kernel"
            text += "" if goal is None else f" {'of' if met else 'BELOW'} {goal:g}"
        print(text + (f"  beside {row['beside']}" if row["beside"] else ""))


def _print_sources(rows: Iterable[Row], routine: str) -> None:
    """For pack and load: how fast source weights are read and packed."""
    print(
        f"{'method':14} {'source':14} {'cache':5} {'thr':>3} {'median ms':>10} {'p90':>8} "
        f"{'s per GB':>8} {'GB/s':>6} {'packed GB/s':>11} {'share of copy':>13} "
        f"{'bytes/weight':>12}"
    )
    for row in rows:
        seconds = row["median_us"] / 1e6
        goal, met = goal_met(row, routine)
        packed = row["packed_bytes"] / seconds / 1e9
        text = (
            f"{row['method']:14} {row.get('source', ''):14} {row.get('cache', ''):5} "
            f"{row['threads']:3} {seconds * 1e3:10.1f} "
            f"{row['p90_us'] / 1e3:8.1f} {seconds / row['source_bytes'] * 1e9:8.3f} "
            f"{row['source_bytes'] / seconds / 1e9:6.2f} {packed:11.2f} {row['share']:13.1%} "
            f"{row['packed_bytes_per_weight']:12.3f}"
        )
        if goal is not None:
            text += f" {'of' if met else 'BELOW'} {goal:.0%}"
        if "first_touch_us" in row:
            text += f"; into new memory {row['first_touch_us'] / 1e3:.1f} ms"
        if "anonymous_bytes" in row:
            met = row["anonymous_bytes"] <= most_anonymous(row)
            text += (
                f"; anonymous memory {row['anonymous_bytes'] / row['packed_bytes']:.2f} of packed, "
                f"{'of' if met else 'ABOVE'} {most_anonymous(row) / row['packed_bytes']:.2f}"
            )
        print(text)


def _print_training(rows: Iterable[Row]) -> None:
    print(
        f"{'package':9} {'method':19} {'kernels':12} {'rank':>4} {'T':>5} {'part':8} "
        f"{'median ms':>10} {'p90':>9} {'tokens/s':>9} {'TOP/s':>6} {'share':>6} {'peak GB':>8}"
    )
    for row in rows:
        text = (
            f"{row['package']:9} {row['method']:19} {row['table']:12} {row['rank']:4} "
            f"{row['tokens']:5} {row['part']:8} {row['median_us'] / 1e3:10.1f} "
            f"{row['p90_us'] / 1e3:9.1f} {row['tokens_s']:9.0f} {row['tera_ops_s']:6.3f} "
            f"{row['share']:6.1%} {row['peak_bytes'] / 2**30:8.2f}"
        )
        for name, (goal, met) in training_goals(row).items():
            text += (
                f"  {row[name]:.2f} {name.replace('_', ' ')}{'' if met else f' MISSES {goal:g}'}"
            )
        print(text)


def most_anonymous(row: Row) -> float:
    """The limit for loading: 1.1 times the packed weights, plus one layer's sources."""
    return 1.1 * row["packed_bytes"] + row["source_bytes"] / row["layers"]


def print_beside(rows: list[Row]) -> None:
    """Prints thread counts against the best one, and other work's effect against the fair share."""
    alone = {
        same_work(row): row for row in rows if row["package"] == "kt_moe" and not row["beside"]
    }
    by_work: dict[tuple[Any, ...], list[Row]] = {}
    for row in alone.values():
        by_work.setdefault((row["method"], row["table"], row["tokens"]), []).append(row)
    for work, same in by_work.items():
        if len(same) > 1:
            best = min(row["median_us"] for row in same)
            costs = (f"{r['threads']}: {r['median_us'] / best - 1:+.0%}" for r in same)
            print(f"threads, {' '.join(map(str, work))}: {', '.join(costs)} against the best")
    for row in rows:
        if row["beside"] and same_work(row) in alone:
            before = alone[same_work(row)]["median_us"]
            print(
                f"beside {row['beside']}, {' '.join(map(str, same_work(row)))}: "
                f"{row['median_us'] / before:.2f} times the time alone"
                + (
                    f", {row['share_of_fair']:.0%} of the fair share"
                    if "share_of_fair" in row
                    else ""
                )
            )


def add_fair_shares(rows: list[Row], cpus: int) -> None:
    """Adds to rows next to busy foreign processes their speed relative to a fair part of the CPUs.

    Every busy thread, kt-moe's or foreign, has the same claim on a CPU.
    """
    alone = {
        same_work(row): row for row in rows if row["package"] == "kt_moe" and not row["beside"]
    }
    for row in rows:
        if row["beside"].endswith(" foreign") and same_work(row) in alone:
            busy = row["threads"] + int(row["beside"].split()[0])
            fair = min(1.0, cpus / busy) / min(1.0, cpus / row["threads"])
            row["share_of_fair"] = alone[same_work(row)]["median_us"] / row["median_us"] / fair
