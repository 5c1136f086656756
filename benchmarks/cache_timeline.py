"""Simulates the live expert cache with its own scheduler, on a timeline of decode steps.

    ENV/bin/python benchmarks/cache_timeline.py --experts 256 --slots 64 102 --share 0.25 0.5 1

`kt bench experts` assumes that what a step missed is there for the next one. Here, the server's
`ModelCache` decides, looks take time, uploads wait for the bus, and maps are used by the batches
after them. No GPU is needed. Times are in milliseconds, measured by cache_costs.py. Prints, for
each number of slots and the largest share of the bus that uploads may take, hit rate, uploads per
token and layer, milliseconds per step, and looks per step, beside a fixed placement.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kt_kernel.device.cache import HostCache
from kt_kernel.moe.placement import Placement
from kt_kernel.routes.synthetic import LOCALITIES, generate
from kt_kernel.serving import cache as caches
from kt_kernel.serving.cache_slots import LayerSlots

DEFAULTS = 0.24, 0.35, 0.0, 0.22, 0.51, 0.14, 0.35, 0.1, 3.0  # of `Times`
TICK = 0.06  # milliseconds that a short sleep takes longer than asked


@dataclass(frozen=True)
class Times:
    """Milliseconds.

    Attributes:
        rest: of a step outside of its layers.
        layer: of a layer without its experts.
        hot: of its experts with a slot, at the same time as the missed ones.
        miss: of a missed expert on the CPU.
        upload: of an expert on the bus.
        beside: that an upload adds to the step beside it.
        look, start: that the cache's thread computes in a look, and for starting an upload.
        waits: how many times as long both take, because the engine's thread runs, too.
    """

    rest: float
    layer: float
    hot: float
    miss: float
    upload: float
    beside: float
    look: float
    start: float
    waits: float


class Timeline:
    """One server that decodes one token after the other. routes: [T, L, k]."""

    def __init__(
        self, routes: np.ndarray, experts: int, slots: int, times: Times, share: float
    ) -> None:
        self.now = self._free = self._next = 0.0  # of the thread, of the bus, of the next layer
        self.tokens = self.uploads = self.looks = self._layer = 0
        self._routes, self._times = routes, times
        self._ends: deque[float] = deque()  # of uploads under way
        layers = routes.shape[1]
        self._memory = HostCache(torch.device("cpu"), layers, experts)
        self.cache = caches.ModelCache(
            [
                caches.CachedLayer(
                    SimpleNamespace(expert_bytes=1),  # type: ignore[arg-type]
                    None,  # type: ignore[arg-type]
                    LayerSlots(Placement.first(experts, slots), self._memory.wanted[number]),
                )
                for number in range(layers)
            ],
            self._memory,
            self,  # type: ignore[arg-type]
            share / times.upload * 1e3,
        )
        self.cache.start(self._memory)

    def start(self, uploads: Sequence[Any]) -> int:
        """Each upload is after those before it."""
        for _ in uploads:
            self._free = max(self.now, self._free) + self._times.upload
            self._ends.append(self._free)
            self._next += self._times.beside
        self.uploads += len(uploads)
        return self.uploads

    def completed(self) -> int:
        while self._ends and self._ends[0] <= self.now:
            self._ends.popleft()
        return self.uploads - len(self._ends)

    def wait(self) -> None:
        """Of `Uploads`; not called while serving."""

    def _advance(self, until: float) -> None:
        while self._next <= until:
            self._begin_layer()
        self.now = until
        if self.tokens >= len(self._routes):
            self.cache._stop.set()

    def _begin_layer(self) -> None:
        t, number = self._times, self._layer
        ids = self._routes[self.tokens % len(self._routes), number]
        self._memory.begin_pass(number, torch.from_numpy(ids[None]), None)
        missed = int((self._memory.live[number].numpy()[ids] < 0).sum())
        self._next += t.layer + max(t.hot, missed * t.miss)
        self._layer += 1
        if self._layer == self._routes.shape[1]:
            self._layer = 0
            self.tokens += 1
            self._next += t.rest

    def run(self, counted_from: int) -> dict[str, float]:
        """Figures of the tokens from this one on."""
        look, begin, computed = self.cache.step, [], [0.0]

        def mark() -> tuple[int, int, int, int, float]:
            found = self._memory.totals()
            hits, routes = int(found.hits.sum()), int(found.routes.sum())
            return hits, routes, self.uploads, self.looks, self._next

        def sleep(seconds: float, _: float) -> None:
            self._advance(self.now + seconds * 1e3 + TICK)
            if self.tokens >= counted_from and not begin:
                begin.append((self.tokens, *mark()))

        def timed_look() -> bool:
            before = self.uploads
            found = look()
            took = self._times.look + self._times.start * (self.uploads - before)
            self.looks += 1
            computed[0] += took
            self._advance(self.now + took * self._times.waits)
            return found

        self.cache.step = timed_look  # type: ignore[method-assign]
        self.cache._sleep = sleep  # type: ignore[method-assign]
        clock = SimpleNamespace(
            perf_counter=lambda: self.now / 1e3,
            thread_time=lambda: computed[0] / 1e3,
            monotonic=lambda: self.now / 1e3,
        )
        with _replaced(caches, "time", clock), _replaced(torch.cuda, "device", _no_device):
            self.cache._filled = 0.0
            self.cache._run()
        self.cache.close()
        first, *then = begin[0]
        hits, routes, uploads, looks, time = (b - a for a, b in zip(then, mark(), strict=True))
        tokens = self.tokens - first
        return {
            "hit_rate": hits / routes,
            "uploads": uploads / tokens / self._routes.shape[1],
            "ms": time / tokens,
            "looks": looks / tokens,
        }


def _no_device(device: torch.device) -> Any:
    return contextlib.nullcontext()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Any:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--locality", choices=[*LOCALITIES], default="qwen3-30b")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--slots", type=int, nargs="+", default=[31, 64, 102])
    parser.add_argument("--share", type=float, nargs="+", default=[0.25, 0.5, 1.0])
    parser.add_argument("--tokens", type=int, default=600)
    # Of DeepSeek-V3's experts in INT4_G32, on an H200 and 12 threads of a Xeon.
    for name, default in zip(Times.__dataclass_fields__, DEFAULTS, strict=True):
        parser.add_argument(f"--{name}", type=float, default=default)
    args = parser.parse_args()
    times = Times(**{name: getattr(args, name) for name in Times.__dataclass_fields__})
    locality = replace(LOCALITIES[args.locality], experts=args.experts)
    routes = generate(locality, args.tokens, args.layers).routes.astype(np.int64)
    print("| slots | share of the bus | hits | uploads | ms per step | looks | faster |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for slots in args.slots:
        fixed = 0.0
        for share in (0.0, *args.share):
            found = Timeline(routes, args.experts, slots, times, share).run(args.tokens // 2)
            fixed = fixed or found["ms"]
            print(
                f"| {slots} | {share:.0%} | {found['hit_rate']:.1%} | {found['uploads']:.2f} | "
                f"{found['ms']:.2f} | {found['looks']:.2f} | {fixed / found['ms']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
