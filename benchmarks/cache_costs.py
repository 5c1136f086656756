"""Explains the speed of the live expert cache: what each of its parts costs per decode step.

    ENV/bin/python benchmarks/cache_costs.py --json FILE --shape deepseek-v3 --layers 4

Run it in vLLM's environment as cache.py, whose engine and routes it uses. All experts have the same
weights, so that several can share a slot, and an upload can be left out without changing what the
engine computes.

- "curve": times of steps by the share of hot routes, without uploads and without looks. Their slope
  is the CPU's time for an expert, and the last one is the bound for every cache.
- "looks": the same with the cache's thread looking at its counters.
- "beside": the same beside uploads at some rate that change nothing: of whole uploads, of their
  copies alone, and of their unpacking alone.
- "moving": the cache, with uploads at some rates, and with uploads that take no time.
- "kernel": microseconds of the cache's kernel.
- "kernels": the GPU's time by kernel, with everything hot.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from cache import arguments, start
from cache_control import FIXED, MOVING, STILL, about_engine
from outputs import save_result

from kt_kernel.device.cache import CudaCache, allow_captures_elsewhere
from kt_kernel.device.uploads import CudaUploads, HostUploads, Upload
from kt_kernel.serving.cache import ModelCache

HITS = (1.0, 0.95, 0.875, 0.75, 0.5, 0.0)
BESIDE = (0.75, 1.0)  # shares of hot routes
RATES = (1 / 4, 1 / 2, 1)  # of the bus
COPY, UNPACK, BOTH = "copy", "unpack", "both"


class NoUploads(HostUploads):
    """Uploads that take no time."""

    def __init__(self) -> None:
        super().__init__(lambda *given: torch.empty(0))

    def _copy(self, upload: Upload) -> None:
        pass


class Beside:
    """Uploads from a thread of its own into a slot that no expert uses."""

    def __init__(self, cache: ModelCache) -> None:
        self._cache = cache
        self._uploads = CudaUploads(cache._memory.device, [layer.packed for layer in cache.layers])
        self._uploads.start([self._upload(layer, 0) for layer in cache.layers])  # prepares them
        self._uploads.wait()

    def _upload(self, layer: Any, expert: int) -> Upload:
        return Upload(layer.packed, layer.weights, expert, layer.weights.num_slots - 1)

    def seconds(self, layer: Any, experts: int) -> float:
        """Of uploads one after the other."""
        begin = time.perf_counter()
        self._uploads.start([self._upload(layer, expert) for expert in range(experts)])
        self._uploads.wait()
        return time.perf_counter() - begin

    @contextmanager
    def running(self, what: str, rate: float) -> Iterator[None]:
        """rate: bytes of packed experts per second."""
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(what, rate, stop))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _run(self, what: str, rate: float, stop: threading.Event) -> None:
        layers = self._cache.layers
        with torch.cuda.device(self._cache._memory.device):
            allow_captures_elsewhere()
            number, due = 0, time.perf_counter()
            while not stop.is_set():
                layer = layers[number % len(layers)]
                expert = number // len(layers) % len(layer.slots.wanted)
                self._one(what, layer, expert)
                number += 1
                due = max(due + layer.packed.expert_bytes / rate, time.perf_counter() - 0.005)
                time.sleep(max(0.0, due - time.perf_counter()))

    def _one(self, what: str, layer: Any, expert: int) -> None:
        upload, uploads = self._upload(layer, expert), self._uploads
        copies = uploads.copies(upload.experts, upload.expert)
        launches = uploads.launches(upload.weights, upload.slot)
        assert launches is not None
        uploads.queue.start([(copies * (what != UNPACK), launches * (what != COPY))])
        uploads.wait()


def kernel_times(device: torch.device, experts: int, top_k: int) -> dict[int, float]:
    """Microseconds of the cache's kernel by tokens, in a graph."""
    memory, found = CudaCache(device, 1, experts), {}
    for tokens in (1, 4, 16):
        ids = torch.randint(experts, (tokens, top_k), device=device)
        memory.begin_pass(0, ids, None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(50):
                memory.begin_pass(0, ids, None)
        times = []
        for _ in range(5):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / 50)
        found[tokens] = sorted(times)[2]
    return found


class Costs:
    def __init__(self, engine: Any, args: argparse.Namespace) -> None:
        self.engine, self.model = engine, engine.model
        self.cache, self.control = self.model.cache, self.model.control
        self.experts: int = args.shape.experts
        self.beside, self.args = Beside(self.cache), args
        self.bus = self._bus()

    def _bus(self) -> float:
        """Bytes per second of uploads one after the other."""
        layer = self.cache.layers[0]
        self.beside.seconds(layer, 32)
        return 32 * layer.packed.expert_bytes / self.beside.seconds(layer, 32)

    def steps(self, **about: Any) -> dict[str, Any]:
        """Milliseconds of a step, with the placement and the mode of now."""
        self.engine.times(16)
        before = self.control.counters()
        times = sorted(self.engine.times(self.args.steps))
        after = self.control.counters()
        count = {name: after[name] - before[name] for name in after}
        return about | {
            "mean_ms": 1e3 * sum(times) / len(times),
            "p50_ms": 1e3 * times[len(times) // 2],
            "p99_ms": 1e3 * times[int(len(times) * 0.99)],
            "hit_rate": count["cache_hits"] / (count["cache_hits"] + count["cache_misses"]),
            "uploads": count["cache_uploads"] / len(times) / len(self.cache.layers),
        }

    def hot(self, share: float, mode: str) -> None:
        self.control.share(round(share * self.experts), lambda: self.engine.times(3))
        self.model.use("none", 1)
        self.control.mode = mode

    def all(self) -> Iterator[tuple[str, Any]]:
        """Every part, and its rows."""
        for share in HITS:
            self.hot(share, STILL)
            yield "curve", self.steps()
        for resident in self.args.resident:
            yield from self.rates(resident)
        for share in BESIDE:
            yield from self.uploads_beside(share)
        for share in BESIDE:
            self.hot(share, FIXED)
            yield "looks", self.steps()
        yield "kernel", kernel_times(self.cache._memory.device, self.experts, self.args.shape.top_k)
        yield "kernels", self.kernels()

    def uploads_beside(self, share: float) -> Iterator[tuple[str, Any]]:
        self.hot(share, STILL)
        for what, rate in [(BOTH, rate) for rate in RATES] + [(COPY, 0.5), (UNPACK, 0.5)]:
            if share == 1 and what == BOTH and rate != 0.5:
                continue
            with self.beside.running(what, rate * self.bus):
                yield "beside", self.steps(what=what, share_of_bus=rate)

    def rates(self, resident: float) -> Iterator[tuple[str, Any]]:
        """The first experts, and the cache with free uploads and at each rate."""
        uploads, given = self.cache._uploads, self.cache.rate
        yield "moving", self.moving(resident, FIXED, 0)
        for rate in (None, *RATES):
            self.cache._uploads = NoUploads() if rate is None else uploads
            self.cache.rate = 1e12 if rate is None else rate * self.bus
            yield "moving", self.moving(resident, MOVING, rate)
        self.cache._uploads, self.cache.rate = uploads, given

    def moving(self, resident: float, mode: str, rate: float | None) -> dict[str, Any]:
        self.control.reset(round(resident * self.experts), lambda: self.engine.times(3))
        self.model.use("local", 1)
        self.control.mode = mode
        self.engine.times(16 if mode == FIXED else 300)
        found = self.steps(resident=resident, mode=mode, share_of_bus=rate)
        self.control.mode = FIXED
        return found

    def kernels(self) -> dict[str, Any]:
        """Microseconds of a step by kernel, with everything hot."""
        from torch.profiler import ProfilerActivity, profile

        self.hot(1.0, STILL)
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            steps = len(self.engine.times(20))
        found: dict[str, float] = defaultdict(float)
        for event in profiled.events():
            found[event.name[:80]] += event.time_range.elapsed_us() / steps
        most = sorted(found.items(), key=lambda item: -item[1])[:16]
        return {"sum_us": sum(found.values()), "us": dict(most)}


def main() -> None:
    about = (__doc__ or "").split("\n", maxsplit=1)[0]
    args = arguments(about, resident=[0.25, 0.4], engines=("vllm",))
    costs = Costs(start(args), args)
    packed = costs.cache.layers[0].packed
    result: dict[str, Any] = about_engine() | {"shape": args.shape._asdict()}
    result |= {"layers": args.layers, "method": args.method, "expert_bytes": packed.expert_bytes}
    result |= {"bus": costs.bus, "hot_format": args.hot_format}
    print(json.dumps({"bus": costs.bus}), flush=True)
    for name, row in costs.all():
        result.setdefault(name, []).append(row)
        print(name, json.dumps(row), flush=True)
        save_result(args.json, result)
    sys.stdout.flush()
    os._exit(0)  # engines take long to end, and everything is saved


if __name__ == "__main__":
    main()
