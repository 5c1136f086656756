"""Simulates placements and caches of hot experts, for docs/placement.md.

    python benchmarks/placement.py OUT [--record FILE] [--tokens 2000] [--layers 4]

Writes OUT.json (all results and how long they took), OUT.png and, to stdout, a table. The records
are those of the generator's presets and, with --record, one of a model: all of its tokens, each as
if it had been decoded. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from outputs import output_files, save_result

from kt_kernel.routes.compare import compare
from kt_kernel.routes.locality import reuse
from kt_kernel.routes.plots import plot_policies
from kt_kernel.routes.policies import LRU
from kt_kernel.routes.record import RouteRecord
from kt_kernel.routes.simulator import Replay, Result
from kt_kernel.routes.synthetic import LOCALITIES, QWEN3_30B, generate

SHARES = (0.05, 0.12, 0.25, 0.4, 0.6)
SHOWN = (
    "first experts",
    "learned before",
    "best fixed",
    "LRU",
    "LFU",
    "decayed LFU, 4 tokens",
    "decayed LFU, 64 tokens",
    "mixture of 4 and 256 tokens, 0.5 : 0.5",
    "Belady",
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=output_files(".json", ".png"))
    parser.add_argument("--record", type=Path, help="file that --record-kt-expert-routes wrote")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--timed-tokens", type=int, default=4096)
    args = parser.parse_args(arguments)
    records = {
        name: generate(locality, args.tokens, args.layers) for name, locality in LOCALITIES.items()
    }
    if args.record is not None:
        found = RouteRecord.load(args.record)
        records["demo model"] = replace(found, passes=np.arange(len(found.passes)))
    panels: dict[str, list[Result]] = {}
    saved: dict[str, Any] = {}
    for name, record in records.items():
        experts = record.model.num_experts
        began = time.perf_counter()
        results = panels[f"{name}, {experts} experts"] = compare(
            record, sorted({max(1, round(share * experts)) for share in SHARES})
        )
        saved[name] = {
            "tokens": len(record.passes),
            "layers": len(record.layers),
            "reuse": {within: reuse(record.routes, within) for within in (1, 8)},
            "seconds": time.perf_counter() - began,
            "results": [asdict(result) for result in results],
        }
    print("\n".join(table(panels)))
    saved["timed"] = timed(48, args.timed_tokens)
    save_result(f"{args.out}.json", saved)
    plot_policies(panels, f"{args.out}.png")


def table(panels: Mapping[str, Sequence[Result]]) -> Iterator[str]:
    """Hit rates in percent."""
    yield "| routes | slots | " + " | ".join(SHOWN) + " |"
    yield "| --- |" + " ---: |" * (1 + len(SHOWN))
    for name, results in panels.items():
        for slots in sorted({result.slots for result in results}):
            hits = {r.policy: f"{r.hit_rate:.0%}" for r in results if r.slots == slots}
            yield f"| {name} | {slots} | " + " | ".join(hits[policy] for policy in SHOWN) + " |"


def timed(layers: int, tokens: int) -> dict[str, float]:
    """Seconds for a model of Qwen3-30B-A3B's size: generating, preparing, one policy."""
    times = [time.perf_counter()]
    record = generate(QWEN3_30B, tokens, layers)
    times.append(time.perf_counter())
    replay = Replay(record)
    times.append(time.perf_counter())
    replay.run(LRU(), 51)
    times.append(time.perf_counter())
    steps = zip(("generate", "prepare", "run"), times, times[1:], strict=False)
    return {"layers": layers, "tokens": tokens} | {name: b - a for name, a, b in steps}


if __name__ == "__main__":
    main()
