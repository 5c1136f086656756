"""Training steps of one layer in turns: two versions of the package, and kt-kernel.

    python benchmarks/training_versions.py BEFORE AFTER --json FILE [--peer FOLDER] [--threads 15]
        [--tokens 512 2048 4096] [--methods AMXBF16_SFT] [--rounds 7] [--shape E,H,I,k]
        [--table amx]

BEFORE and AFTER are folders into which a wheel of each version was unpacked, FOLDER is one for
kt-kernel's. Every method has a process for each of the three, which stands still while another one
is timed. `versions_table` makes a table of a saved result.
"""

from __future__ import annotations

import argparse
import datetime
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from helper import Helper, HelperError
from outputs import output_file, save_result
from peer_client import PACKAGE
from saved import Content
from shapes import parse_shape
from table import grid, machine_and_layer
from training_layers import SFT_METHODS

PARTS = ("forward", "backward", "step")
SECONDS = 0.3  # of a visit, at least one step


def versions_table(content: Content) -> str:
    """Milliseconds of a step before, after and with kt-kernel, and ratios of each part."""
    ms = {(r["method"], r["tokens"], r["version"]): r["ms"] for r in content["rows"]}
    versions = list(dict.fromkeys(version for _, _, version in ms))
    columns = [*versions, "before / after"]
    if PACKAGE in versions:
        columns += [f"{PACKAGE} / after", "its forward", "its backward"]
    lines = []
    for method, tokens in dict.fromkeys((method, tokens) for method, tokens, _ in ms):
        of = {version: ms[method, tokens, version] for version in versions}
        cells = [f"{of[version]['step']:.1f}" for version in versions]
        cells.append(f"{of['before']['step'] / of['after']['step']:.2f}")
        if PACKAGE in versions:
            ratios = (of[PACKAGE][p] / of["after"][p] for p in ("step", "forward", "backward"))
            cells += [f"{ratio:.2f}" for ratio in ratios]
        lines.append((f"{method}, T={tokens}", cells))
    tables = [machine_and_layer(content), grid("ms of a step", columns, lines)]
    for direction in ("forward", "backward"):
        if "phases" in content:
            tables.append(_phases({m: of[direction] for m, of in content["phases"].items()}))
    return "\n\n".join(tables)


def _phases(of: dict[str, dict[str, dict[str, float]]]) -> str:
    """Phases of a pass by methods: milliseconds, and in parentheses what threads worked of them on
    average."""
    names = list(max(of.values(), key=len))  # the other methods have some of these
    lines = []
    for method, phases in of.items():
        cells = [
            "" if n not in phases else "{ms:.1f} ({work_ms:.1f})".format(**phases[n]) for n in names
        ]
        lines.append((method, cells))
    return grid("ms of a phase", names, lines)


def _start(key: tuple[str, str], folder: str, args: argparse.Namespace) -> Helper:
    method, version = key
    request = {
        "package": PACKAGE if version == PACKAGE else "kt_moe",
        "method": method,
        "shape": list(args.shape),
        "rank": args.rank,
        "threads": args.threads,
        "torch_threads": args.threads,
        "max_tokens": max(args.tokens),
        "folder": args.peer,
    }
    environment = {
        "KT_KERNEL_CPU_VARIANT": args.table,
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": folder,
    }
    return Helper(f"{version} {method}", "training_side.py", request, environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--peer")
    parser.add_argument("--json", type=output_file, required=True)
    parser.add_argument("--methods", nargs="+", choices=SFT_METHODS, default=list(SFT_METHODS)[:3])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--shape", type=parse_shape, default="qwen3-30b-a3b")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--threads", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--table", default="amx", help="kt-kernel trains with no other than amx")
    args = parser.parse_args()
    from machine import about

    folders = {"before": args.before, "after": args.after}
    if args.peer:
        folders[PACKAGE] = args.after
    keys = [(method, version) for method in args.methods for version in folders]
    # The threads stay to the end, since a child dies with the thread that started it.
    pool = ThreadPoolExecutor(len(keys))
    sides = dict(zip(keys, pool.map(lambda k: _start(k, folders[k[1]], args), keys), strict=True))
    times: dict[tuple[str, int, str], list[dict[str, list[float]]]] = {}
    try:
        for _ in range(args.rounds):
            for tokens in sorted(args.tokens):  # so that buffers only grow
                for (method, version), side in sides.items():
                    visit = side.ask(tokens=tokens, seconds=SECONDS)
                    times.setdefault((method, tokens, version), []).append(visit)
    except HelperError as error:
        raise SystemExit(f"error: {error}") from None
    finally:
        for side in sides.values():
            side.close()
    content: dict[str, Any] = about() | {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "threads": args.threads,
        "rank": args.rank,
        "shape": args.shape._asdict(),
        "rounds": args.rounds,
        "rows": [
            {"method": m, "tokens": t, "version": v, "ms": medians(visits)}
            for (m, t, v), visits in times.items()
        ],
    }
    save_result(args.json, content)
    print(versions_table(content))


def medians(visits: list[dict[str, list[float]]]) -> dict[str, float]:
    """Milliseconds of each part, over all steps of all visits."""
    return {
        part: round(1e3 * median([x for visit in visits for x in visit[part]]), 2) for part in PARTS
    }


if __name__ == "__main__":
    main()
