"""Prints saved results of tune.py as the table of docs/tuning.md.

python benchmarks/tune_table.py FILE...
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines of markdown: measured times, and the predictions' errors."""
    first = rows[0]
    heads = [f"{n} stream{'s' * (n != '1')}" for n in first["decode"]]
    heads += [f"prompt of {int(n):,}" for n in first["prefill"]]
    yield "| method, share of hot experts, threads | " + " | ".join(heads) + " |"
    yield "|" + " --- |" * (len(heads) + 1)
    for row in rows:
        times = [*row["decode"].values(), *row["prefill"].values()]
        cells = [
            f"{1e3 * seconds:.3g} ms, {error:+.0%}"
            for seconds, error in zip(times, row["errors"].values(), strict=True)
        ]
        yield f"| {name(row['configuration'])} | " + " | ".join(cells) + " |"


def name(configuration: str) -> str:
    """Of METHOD:PART:THREADS, or another name."""
    method, *rest = configuration.split(":")
    if not rest:
        return "vLLM without kt-moe, all hot" if method == "stock" else method
    return f"{method}, {float(rest[0]):.0%}, {rest[1]}"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    errors = [abs(error) for row in rows for error in row["errors"].values()]
    within = sum(error <= 0.15 for error in errors)
    return (
        f"{within} of {len(errors)} predictions are within 15%; "
        f"the median error is {median(errors):.0%}, the largest {max(errors):.0%}."
    )


def page(file: Path) -> str:
    rows = [row for row in json.loads(file.read_text())["rows"] if "errors" in row]
    return "\n".join([*table(rows), "", summary(rows)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    print("\n\n".join(page(file) for file in parser.parse_args().files))


if __name__ == "__main__":
    main()
