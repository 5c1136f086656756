"""Two versions of the package in turns: the forward pass of one MoE layer.

python benchmarks/versions.py BEFORE AFTER --json FILE [--methods Q6_K,BF16] [--repeats 2]
    [--table amx --threads 15 --shape 64,2048,768,8 --prefill 1024]

BEFORE and AFTER are checkouts, each with its wheel unpacked in a folder "built":
    wheel=$(.ci/env.sh wheel) && unzip -q "$wheel" -d built

Each repeat starts two processes of each version, because times depend by some percent on where
a process gets its memory. The four take turns on the same cores: a round is one visit of each. The
ratio of a round is the time of both processes of AFTER over that of both of BEFORE.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from outputs import output_file, save_result

DECODE = 1  # tokens
VISITS = {"decode": (15, 25), "prefill": (1, 14)}  # passes of a visit, rounds


class Setup(NamedTuple):
    """What is measured: kernel table, threads, "E,H,I,k", tokens of a prefill batch."""

    table: str
    threads: int
    shape: str
    prefill: int

    def batches(self) -> dict[int, tuple[int, int]]:
        return {DECODE: VISITS["decode"], self.prefill: VISITS["prefill"]}


def worker(checkout: str, method: str, *given: str) -> None:
    """Serves visits: reads "tokens passes", answers with the shortest time in seconds."""
    setup = Setup(given[0], int(given[1]), given[2], int(given[3]))
    sys.path[0] = f"{checkout}/benchmarks"
    import torch

    torch.set_num_threads(1)
    from layer import LayerBench
    from methods import METHODS
    from shapes import inputs, parse_shape

    shape = parse_shape(setup.shape)
    bench = LayerBench(shape, METHODS[method], setup.table, setup.threads, 1)
    sums = [bench.output(tokens).double().sum().item() for tokens in setup.batches()]
    print(json.dumps(sums), flush=True)
    batches = {}
    for tokens in setup.batches():
        x, weights = inputs(shape, tokens)
        random = torch.Generator().manual_seed(tokens)
        rows = [torch.randperm(shape.experts, generator=random) for _ in range(tokens)]
        ids = torch.stack(rows)[:, : shape.top_k].contiguous()
        batches[tokens] = (x, ids, weights, torch.empty_like(x))
    for line in sys.stdin:
        tokens, passes = map(int, line.split())
        print(min(bench._forward(0, *batches[tokens]) for _ in range(passes)), flush=True)


class Process:
    """One version's worker for one method."""

    def __init__(self, checkout: Path, method: str, setup: Setup) -> None:
        cores = range(1, 2) if setup.threads == 1 else range(setup.threads)
        self._child = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(checkout), method, *map(str, setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(checkout / "built"), "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self.sums = json.loads(self._read())

    def visit(self, tokens: int, passes: int) -> float:
        assert self._child.stdin
        self._child.stdin.write(f"{tokens} {passes}\n")
        self._child.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        self._child.communicate()

    def _read(self) -> str:
        assert self._child.stdout
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit(f"a process ended with code {self._child.wait()}")
        return line


def compare(before: Path, after: Path, method: str, setup: Setup) -> list[dict[str, Any]]:
    """A row for each batch size."""
    processes = [Process(version, method, setup) for version in (before, after) * 2]
    rows = []
    for tokens, (passes, rounds) in setup.batches().items():
        times: list[list[float]] = [[] for _ in processes]
        for number in range(-1, rounds):
            order = range(4) if number % 2 else range(3, -1, -1)
            for i in order:
                time = processes[i].visit(tokens, passes)
                if number >= 0:  # the first round brings code and weights back
                    times[i].append(time)
        least = [1e6 * min(one) for one in times]
        ratios = [(t[1] + t[3]) / (t[0] + t[2]) for t in zip(*times, strict=True)]
        rows.append(
            {
                "method": method,
                "tokens": tokens,
                "before_us": round(min(least[0], least[2]), 1),
                "after_us": round(min(least[1], least[3]), 1),
                "ratio": round(median(ratios), 4),
                "before_against_before": round(least[2] / least[0], 4),
                "same_bits": all(p.sums == processes[0].sums for p in processes),
            }
        )
    for process in processes:
        process.close()
    return rows


def merged(repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of several repeats: the shortest times, the mean ratio, the largest noise."""
    row = dict(repeats[0])
    for name in ("before_us", "after_us"):
        row[name] = min(one[name] for one in repeats)
    row["ratio"] = round(sum(one["ratio"] for one in repeats) / len(repeats), 4)
    noise = [one["before_against_before"] for one in repeats]
    row["before_against_before"] = max(noise, key=lambda ratio: abs(ratio - 1))
    row["same_bits"] = all(one["same_bits"] for one in repeats)
    return row


def version_of(checkout: Path) -> str:
    """The commit, or the folder's name where the checkout came without its history."""
    if not (checkout / ".git").exists():
        return checkout.name
    command = ["git", "-C", checkout, "describe", "--always", "--dirty"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        return worker(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--json", type=output_file, required=True, help="file for the result")
    parser.add_argument("--methods", help="names, separated by commas (default: all)")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--table", default="avx2", help="kernel table (default: avx2)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--shape", default="16,2048,768,8", help="E,H,I,k")
    parser.add_argument("--prefill", type=int, default=64, help="tokens of a prefill batch")
    args = parser.parse_args()
    setup = Setup(args.table, args.threads, args.shape, args.prefill)

    from machine import about
    from methods import METHODS
    from shapes import parse_shape

    shape = parse_shape(setup.shape)
    rows = []
    for method in args.methods.split(",") if args.methods else METHODS:
        repeats = [
            compare(args.before.resolve(), args.after.resolve(), method, setup)
            for _ in range(args.repeats)
        ]
        for batch in zip(*repeats, strict=True):
            rows.append(merged(list(batch)))
            print(rows[-1], flush=True)
    result = {
        "date": datetime.date.today().isoformat(),
        **{name: about()[name] for name in ("cpu", "cpus", "torch", "load_average")},
        "table": setup.table,
        "threads": setup.threads,
        "prefill": setup.prefill,
        "shape": {
            "name": setup.shape,
            "experts": shape.experts,
            "hidden": shape.hidden,
            "inter": shape.inter,
            "top_k": shape.top_k,
        },
        "before": version_of(args.before),
        "after": version_of(args.after),
        "repeats": args.repeats,
        "rows": rows,
    }
    save_result(args.json, result)


if __name__ == "__main__":
    main()
