"""Controls the live expert cache of a model in this process, for cache.py and cache_exact.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from machine import about

from kt_kernel.device.uploads import Upload
from kt_kernel.moe.placement import Placement
from kt_kernel.serving.cache import ModelCache
from kt_kernel.serving.cache_policy import Gain
from kt_kernel.serving.cache_slots import LayerSlots

FIXED, MOVING, RESTLESS, STILL = "fixed", "moving", "restless", "still"


def about_engine(engine: str = "vllm") -> dict[str, Any]:
    """What a result says of the machine and of the engine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"machine": about(), "gpu": gpu, "engine": engine, "engine_version": version(engine)}


class Control:
    """mode: `FIXED`: experts stay; `MOVING`: as the cache decides; `RESTLESS`: random experts move
    in every layer at every look; `STILL`: experts stay, and nothing looks at the counters."""

    def __init__(self, cache: ModelCache) -> None:
        self.cache, self.mode = cache, FIXED
        self._step, self._scored = cache._step, cache._look
        self._look_at_all, self._changing = cache.step, False
        self._random = np.random.default_rng(0)
        cache._step = self._look  # type: ignore[method-assign]
        cache._look = self._wanted  # type: ignore[method-assign]
        cache.step = self._unless_changing  # type: ignore[method-assign]

    def _unless_changing(self) -> bool:
        """A look that waits for a change of the placement would count as a long one, and the
        thread would pause for a multiple of it."""
        return False if self._changing else self._look_at_all()

    def _look(self) -> bool:
        if self.mode == STILL:
            return False
        if self.mode == FIXED:
            self.cache._last = self.cache._memory.totals()
            return False
        if self.mode == RESTLESS:
            self.cache._waits = True
        return self._step()

    def _wanted(self) -> tuple[bool, list[tuple[int, int, int]]]:
        new, moves = self._scored()
        if self.mode != RESTLESS:
            return new, moves
        found = []
        for number, layer in enumerate(self.cache.layers):
            away = np.flatnonzero(~layer.slots.resident & (layer.slots.wanted < 0))
            here = np.flatnonzero(layer.slots.evictable)
            if len(away) and len(here):
                pair = self._random.choice(away), self._random.choice(here)
                found.append((number, int(pair[0]), int(pair[1])))
        return new, found

    def counters(self) -> dict[str, int]:
        """As `ModelCache.stats`, at this moment."""
        with self.cache._lock:
            self.cache._last = self.cache._memory.totals()
            return self.cache.stats()

    def reset(self, resident: int, run: Callable[[], Any]) -> None:
        """The first ``resident`` experts get the first slots, and the cache has no others. run:
        computes a batch."""
        self._empty(run)
        cache = self.cache
        with self._change():
            for number in range(len(cache.layers)):
                self._fill(number, resident)
            cache._uploads.wait()
            self._publish()
            cache._gain = Gain()
        run()

    def share(self, resident: int, run: Callable[[], Any]) -> None:
        """As `reset`, where several experts may have the same slot, for experts that all have the
        same weights. Nothing may move after it until the next `reset`."""
        self._empty(run)
        with self._change():
            for layer in self.cache.layers:
                experts = np.arange(len(layer.slots.wanted))
                layer.slots.wanted[:] = np.where(
                    experts < resident, experts % layer.weights.num_slots, -1
                )
                layer.slots.version += 1
            self._publish()
        run()

    @contextmanager
    def _change(self) -> Iterator[None]:
        self._changing = True
        try:
            with self.cache._lock:
                yield
        finally:
            self._changing = False

    def _empty(self, run: Callable[[], Any]) -> None:
        """Empties all slots."""
        self.mode = FIXED
        with self._change():
            self._finish_uploads()
            for layer in self.cache.layers:
                layer.slots.wanted[:] = -1
                layer.slots.version += 1
            self._publish()
        run()  # takes the map into use
        run()  # and this one is later than all batches with the old one

    def _fill(self, number: int, resident: int) -> None:
        layer = self.cache.layers[number]
        old, experts = layer.slots, len(layer.slots.wanted)
        self.cache._uploads.start(
            [Upload(layer.packed, layer.weights, expert, expert) for expert in range(resident)]
        )
        cold = [-1] * (experts - resident)
        slots = LayerSlots(Placement((*range(resident), *cold), resident), old.wanted)
        slots.version = old.version + 1
        self.cache.set_slots(number, slots)
        layer.evicted.clear()

    def _finish_uploads(self) -> None:
        self.cache._uploads.wait()
        while self.cache._under_way:
            number, slot, _ = self.cache._under_way.popleft()
            self.cache.layers[number].slots.uploaded(slot)

    def _publish(self) -> None:
        self.cache._write_versions()
        self.cache._memory.publish()
