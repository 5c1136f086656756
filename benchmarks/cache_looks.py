"""What a look of the live expert cache takes beside an engine's thread, of two versions in turns.

    ENV/bin/python benchmarks/cache_looks.py --old FOLDER --json FILE

FOLDER contains another version's `kt_kernel`. A thread imitates the engine: in steps of about 2 ms,
it does some bookkeeping in Python between small operations of torch, waits as for a GPU, and counts
routes as the GPU would. The cache's own loop looks at the counters beside it. Uploads take no time.
No GPU is needed: what copies and launches cost there is not in these figures.

For each round and version: milliseconds of a step without looks and beside them, of a look, and
how long it computes; looks per step; and how often the engine's thread had to wait in a step, for
Python's lock or for its "GPU", which depends less than times on what else the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from outputs import output_file, save_result

BLOCKS = 10  # of a step, each with bookkeeping and some operations
OPERATIONS, ELEMENTS = 5, 64
COMPUTES, WAITS = 1.7e-3, 3e-4  # seconds of a step alone


class Engine:
    """Steps of a fixed amount of work, and the routes of a token in each of them."""

    def __init__(self, memory: Any, routes: np.ndarray) -> None:
        tokens, layers, _ = routes.shape
        self._memory, self._values = memory, memory.totals().uses.base
        experts = memory.wanted.shape[1]
        row = self._values.shape[1]
        self._counts = np.zeros((tokens, layers, row), np.int64)
        for token in range(tokens):
            for layer in range(layers):
                self._counts[token, layer, routes[token, layer]] = 1
        self._counts[:, :, experts] = 1  # tokens
        self._version = experts + 3
        self._x, self._notes, self._number = torch.ones(ELEMENTS), dict[int, int](), 0
        self._entries = 100
        for _ in range(4):
            fastest = min(self.times(40)) - WAITS
            self._entries = max(1, round(self._entries * COMPUTES / fastest))

    def times(self, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            begin = time.perf_counter()
            for _ in range(BLOCKS):
                for entry in range(self._entries):
                    self._notes[entry] = self._number + entry
                for _ in range(OPERATIONS):
                    self._x.mul_(1.0)
            self._count()
            time.sleep(WAITS)
            found.append(time.perf_counter() - begin)
        return found

    def _count(self) -> None:
        self._values += self._counts[self._number % len(self._counts)]
        self._values[:, self._version] = self._memory.versions
        self._number += 1
        self._memory.passed[:] = self._number


class NoTime:
    """Uploads of both versions."""

    queue = None

    def __init__(self) -> None:
        self.started = 0

    def start(self, *given: Any) -> Any:
        if len(given) > 1:  # before `completed` was added: an expert of a layer
            self.started += 1
            return lambda: True
        self.started += len(given[0])
        return self.started

    def completed(self) -> int:
        return self.started


def _waits() -> int:
    """How often this thread has given its core away so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def one(args: argparse.Namespace) -> dict[str, Any]:
    """The version of this process."""
    from kt_kernel.device.cache import HostCache
    from kt_kernel.moe.placement import Placement
    from kt_kernel.routes.synthetic import QWEN3_30B, generate
    from kt_kernel.serving import cache as caches
    from kt_kernel.serving.cache_slots import LayerSlots

    torch.set_num_threads(1)
    torch.cuda.device = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc]
    memory = HostCache(torch.device("cpu"), args.layers, args.experts)
    record = generate(replace(QWEN3_30B, experts=args.experts), 400, 4).routes.astype(np.int64)
    routes = record[:, np.arange(args.layers) % 4]
    packed, slots = SimpleNamespace(expert_bytes=1), args.experts // 4
    layers = [
        caches.CachedLayer(
            packed,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            LayerSlots(Placement.first(args.experts, slots), memory.wanted[number]),
        )
        for number in range(args.layers)
    ]
    uploads = NoTime()
    cache = caches.ModelCache(layers, memory, uploads, args.rate)  # type: ignore[arg-type]
    cache.start(memory)
    engine, looks = Engine(memory, routes), []
    step = cache.step

    def timed() -> bool:
        begin, computed = time.perf_counter(), time.thread_time()
        found = step()
        looks.append((time.perf_counter() - begin, time.thread_time() - computed))
        return found

    cache.step = timed  # type: ignore[method-assign]
    waits = [_waits()]
    alone = engine.times(args.steps)
    waits.append(_waits())
    cache._thread = thread = threading.Thread(target=cache._run, daemon=True)
    thread.start()
    engine.times(100)
    looks.clear()
    waits.append(_waits())
    started, beside = uploads.started, engine.times(args.steps)
    waits.append(_waits())
    count = len(looks)
    cache.close()
    wall, computed = zip(*looks[:count], strict=True)
    return {
        "step_alone_ms": 1e3 * median(alone),
        "step_beside_ms": 1e3 * median(beside),
        "waits_alone": (waits[1] - waits[0]) / args.steps,
        "waits_beside": (waits[3] - waits[2]) / args.steps,
        "look_ms": 1e3 * median(wall),
        "look_mean_ms": 1e3 * sum(wall) / count,
        "look_computes_ms": 1e3 * median(computed),
        "looks_per_step": count / args.steps,
        "uploads_per_step": (uploads.started - started) / args.steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--old", type=Path)
    parser.add_argument("--json", type=output_file)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--rate", type=float, default=500.0, help="uploads per second")
    parser.add_argument("--here", action="store_true", help="this version only, in this process")
    args = parser.parse_args()
    if args.here:
        print(json.dumps(one(args)))
        return
    from machine import about

    command = [sys.executable, *sys.argv, "--here"]
    rows: dict[str, list[dict[str, Any]]] = {"old": [], "new": []}
    for number in range(args.rounds):
        for name in ("old", "new") if number % 2 == 0 else ("new", "old"):
            if name == "old" and args.old is None:
                continue
            env = os.environ | ({"PYTHONPATH": str(args.old)} if name == "old" else {})
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
            rows[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, done.stdout.splitlines()[-1], flush=True)
    found: dict[str, Any] = {"machine": about(), "layers": args.layers, "experts": args.experts}
    for name, of_version in rows.items():
        if of_version:
            middle = {key: median(row[key] for row in of_version) for key in of_version[0]}
            found[name] = {"median": middle, "rounds": of_version}
            print(name, json.dumps(middle))
    if args.json:
        save_result(args.json, found)


if __name__ == "__main__":
    main()
