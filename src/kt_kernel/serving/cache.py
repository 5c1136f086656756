"""The live expert cache: experts move between the CPU and the slots while a model runs.

The device part, and why every expert is computed once, is in `kt_kernel.device.cache`. This module
decides what moves. With a GPU, a thread looks at the device's counters; nothing waits for it.
"""

from __future__ import annotations

import logging
import multiprocessing.util
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..device.cache import CacheMemory, Totals, allow_captures_elsewhere
from ..device.slots import SlotWeights
from ..device.streaming.experts import PackedExperts
from ..device.uploads import Upload, Uploads
from ..runtime.background import start_thread
from ..runtime.variant import native
from .cache_policy import MOVES, Gain, Scores, make_policies
from .cache_slots import LayerSlots

TICK_SECONDS = 0.0002  # between two checks whether there is something to look at
# Times as long as a look computed: meanwhile, the engine's thread cannot launch. A look also waits
# for that thread, and then takes several times as long as it computes.
_PAUSE = 4
_OFTEN_SECONDS = 0.002  # between looks during a step that takes longer
_SELDOM_SECONDS = 0.02  # between looks while moves do not pay
_IDLE_SECONDS = 0.005
_LONGEST_NAP = 1.0  # seconds, after which the thread sees that it has to end
_IDLE_LOOKS = 50  # without a batch, after which it looks less often
_MANY_SLOTS = 16  # from so many on, a layer keeps slots empty for the next uploads
_IN_FLIGHT = 16  # uploads of all layers
_BURST_SECONDS = 0.01

_logger = logging.getLogger("kt_kernel.serving")
_caches: list[ModelCache] = []


@dataclass
class CachedLayer:
    """A layer whose experts move.

    Attributes:
        packed: all of its experts.
        weights: the engine's, of the experts with a slot.
        slots: which expert is where.
    """

    packed: PackedExperts
    weights: SlotWeights
    slots: LayerSlots
    evicted: deque[int] = field(default_factory=lambda: deque(maxlen=64))


@dataclass
class CacheCounters:
    """Attributes: see docs/placement.md."""

    cache_uploads: int = 0
    cache_evictions: int = 0
    cache_uploaded_bytes: int = 0


class ModelCache:
    """The layers of one model whose experts move.

    rate: bytes per second that uploads may use; None: no bound, and moves are made even if they do
    not pay.
    """

    def __init__(
        self,
        layers: Sequence[CachedLayer],
        memory: CacheMemory,
        uploads: Uploads,
        rate: float | None,
    ) -> None:
        self.layers, self._memory, self._uploads = list(layers), memory, uploads
        shape = memory.wanted.shape
        self._resident, self._evictable = np.zeros(shape, bool), np.zeros(shape, bool)
        for number, layer in enumerate(self.layers):
            self.set_slots(number, layer.slots)
        slots = [layer.slots.num_slots for layer in self.layers]
        self._scores = Scores(make_policies(), slots, shape[1])
        self._gain = Gain()
        self.rate = rate
        self._budget, self._filled = 0.0, time.monotonic()
        self._wait = 0.0  # seconds between looks, at least
        self._passed = 0  # tokens of the last layer, at the last look
        # Uploads: layer, slot, and its number among all uploads.
        self._under_way: deque[tuple[int, int, int]] = deque()
        self.counters = CacheCounters()
        self._last: Totals | None = None
        self._versions: list[int] = []  # that the device used at the last look
        self._waits = False  # an upload, for the budget or for other uploads
        self._began = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def set_slots(self, number: int, slots: LayerSlots) -> None:
        """Gives a layer other slots. Nothing may be under way."""
        slots.share(self._resident[number], self._evictable[number])
        self.layers[number].slots = slots

    # ---- batches ----------------------------------------------------------------------------

    def begin_pass(
        self, layer: int, ids: torch.Tensor, padding: torch.Tensor | None, stream: Any
    ) -> None:
        """Before a batch of a layer: see `CacheMemory.begin_pass`."""
        if self._memory.device.type != "cuda" and layer == 0 and self._began:
            self.step()  # nothing is under way
        self._memory.begin_pass(layer, ids, padding, stream)

    @property
    def policy(self) -> str:
        """Name of the policy in use."""
        return self._scores.policy.name

    def live_map(self, layer: int) -> torch.Tensor:
        """int32 [E] on the device: the slots of a layer's experts."""
        return self._memory.live[layer]

    # ---- start and end ----------------------------------------------------------------------

    def begin(self) -> None:
        """Experts move from now on. Called at the end of an engine's start: what was counted so far
        is forgotten. On a GPU, no CUDA graph may be captured at this moment."""
        if self._began:
            return
        self._memory.clear()
        self._began = True
        if self._memory.device.type == "cuda":
            self._thread = start_thread("kt-cache", self._run, self._stop.set)

    def start(self, owner: object) -> None:
        """Publishes the first maps, and prepares `begin`. The thread ends with the owner, or with
        the process."""
        for layer in self.layers:
            layer.slots.version += 1
        self._write_versions()
        self._memory.publish()
        _caches.append(self)
        multiprocessing.util.Finalize(owner, self.close, exitpriority=100)

    def close(self) -> None:
        """Ends the thread; experts stay where they are."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
        if self in _caches:
            _caches.remove(self)

    def _run(self) -> None:
        try:
            with torch.cuda.device(self._memory.device):
                allow_captures_elsewhere()
                idle, nap, looked = 0, TICK_SECONDS, time.perf_counter()
                published, publishing = looked, 0.0
                while not self._stop.is_set():
                    self._sleep(nap, time.perf_counter() - looked)
                    nap = TICK_SECONDS if idle < _IDLE_LOOKS else _IDLE_SECONDS
                    now, computed = time.perf_counter(), time.thread_time()
                    if not self._due(now - looked):
                        if self._arrived() and now >= published + _PAUSE * publishing:
                            self._publish_arrived()
                            published = time.perf_counter()
                            publishing = time.thread_time() - computed
                        continue
                    idle = 0 if self.step() else idle + 1
                    looked = time.perf_counter()
                    self._wait = self._until_next(time.thread_time() - computed)
                    if not self._under_way:
                        nap = min(max(nap, self._wait), _LONGEST_NAP)
        except Exception:
            _logger.exception("kt: experts no longer move, because of an error; serving goes on")

    def _sleep(self, tick: float, since: float) -> None:
        """Sleeps for some ticks until there may be something to do. since: seconds after the last
        look. Each time that this thread takes Python's lock, the engine's thread has to wait."""
        queue, completed = None, 0
        if self._under_way:
            queue, completed = self._uploads.queue, self._under_way[0][2] - 1
            if queue is None:  # they are complete by now
                time.sleep(tick)
                return
        least, most = self._wait - since, max(self._wait, _OFTEN_SECONDS) - since
        passed = self._memory.passed[-1:]
        native().wait_for_news(tick, least, most, passed, self._passed, queue, completed)

    def _due(self, since: float) -> bool:
        """Whether to look now, so many seconds after the last look: at the end of a step, when the
        engine's thread waits for the GPU and the CPU has no experts to compute; when an upload is
        complete; and now and then during long steps."""
        if since < self._wait:
            return False
        if since >= _OFTEN_SECONDS or self._memory.passed[-1] != self._passed:
            return True
        return self._arrived() > 0

    def _arrived(self) -> int:
        """How many uploads are complete that were not taken note of."""
        if not self._under_way:
            return 0
        completed = self._uploads.completed()
        return sum(number <= completed for _, _, number in self._under_way)

    def _publish_arrived(self) -> None:
        """Publishes complete uploads, without a look, so that the next batches use them."""
        with self._lock:
            self._take_arrived()
            self._publish()

    def _until_next(self, took: float) -> float:
        """Seconds to wait at least after a look that computed for so many."""
        return max(0.0 if self._pays else _SELDOM_SECONDS, _PAUSE * took)

    @property
    def _pays(self) -> bool:
        """Whether experts move because that gains something, or anyway."""
        return self.rate is None or self._gain.pays

    # ---- one look ---------------------------------------------------------------------------

    def step(self) -> bool:
        """Looks at the counters, and moves experts. Returns whether there was a new batch or an
        upload under way."""
        with self._lock:
            return self._step()

    def _step(self) -> bool:
        self._passed = int(self._memory.passed[-1])
        arrived = self._take_arrived()
        new, moves = self._look()
        totals = self._last = self._memory.counted
        if new:
            self._gain.judge(totals)
        versions = totals.versions.tolist()
        more = new or arrived or self._waits or versions != self._versions
        self._versions = versions
        if not more:
            return bool(self._under_way)
        self._fill_budget()
        if self._budget > 0:  # otherwise slots would only stay empty
            self._evict(moves)
        self._publish()
        self._upload(moves, totals)
        return new or bool(self._under_way)

    def _look(self) -> tuple[bool, list[tuple[int, int, int]]]:
        """`Scores.look`. Slots that are kept empty do not count as free. Otherwise, the experts
        that were evicted from them would be wanted again at once."""
        free = [max(0, len(layer.slots.free) - self._kept_empty(layer)) for layer in self.layers]
        return self._scores.look(self._memory, self._resident, self._evictable, free)

    def _kept_empty(self, layer: CachedLayer) -> int:
        """How many slots of a layer are kept empty, so that a wanted expert need not wait until no
        kernel reads an evicted one. None are while moves do not pay."""
        slots = layer.slots.num_slots
        return min(1 + slots // _MANY_SLOTS, MOVES) if self._pays and slots >= _MANY_SLOTS else 0

    def _take_arrived(self) -> bool:
        """Takes note of complete uploads. Returns whether there were any."""
        found = False
        for _ in range(self._arrived()):
            layer, slot, _ = self._under_way.popleft()
            self.layers[layer].slots.uploaded(slot)
            found = True
        return found

    def _publish(self) -> None:
        """Publishes the maps if they have changed."""
        changed = [
            layer.slots.next_map(version)
            for layer, version in zip(self.layers, self._versions, strict=True)
        ]
        if any(changed):
            self._write_versions()
            self._memory.publish()

    def _write_versions(self) -> None:
        self._memory.versions[:] = [layer.slots.version for layer in self.layers]

    def _evict(self, moves: Sequence[tuple[int, int, int]]) -> None:
        for number, _, expert in moves:
            layer = self.layers[number]
            spare = max(1, self._kept_empty(layer))
            if layer.slots.coming_free < spare and layer.slots.evictable[expert]:
                layer.slots.evict(expert)
                layer.evicted.append(expert)
                self.counters.cache_evictions += 1

    def _upload(self, moves: Sequence[tuple[int, int, int]], totals: Totals) -> None:
        self._waits = False
        starting: list[tuple[int, Upload]] = []
        for number, expert, other in moves:
            layer = self.layers[number]
            slots = layer.slots
            if self._budget <= 0 or len(self._under_way) + len(starting) >= _IN_FLIGHT:
                self._waits = True
                break
            if not slots.free or slots.resident[expert] or slots.wanted[expert] >= 0:
                continue
            slot = slots.upload(expert)
            starting.append((number, Upload(layer.packed, layer.weights, expert, slot)))
            size = layer.packed.expert_bytes
            self._budget -= size
            self.counters.cache_uploads += 1
            self.counters.cache_uploaded_bytes += size
            instead_of = layer.evicted.popleft() if layer.evicted else other
            self._gain.moved(totals, number, expert, instead_of)
        if starting:
            last = self._uploads.start([upload for _, upload in starting])
            for at, (number, upload) in enumerate(starting, last - len(starting) + 1):
                self._under_way.append((number, upload.slot, at))

    def _fill_budget(self) -> None:
        now = time.monotonic()
        passed, self._filled = now - self._filled, now
        if self.rate is None:
            self._budget = float("inf")
            return
        rate = self.rate * self._gain.share
        longest = max(_BURST_SECONDS, 1.5 * self._wait)  # with the look itself
        self._budget = min(self._budget + passed * rate, rate * longest)

    # ---- for operators ----------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Counters since `begin`."""
        hits = misses = 0
        if self._last is not None:
            hits = int(self._last.hits.sum())
            misses = int(self._last.routes.sum()) - hits
        return {"cache_hits": hits, "cache_misses": misses, **vars(self.counters)}


def begin() -> None:
    """`ModelCache.begin` of all models of this process."""
    for cache in list(_caches):
        cache.begin()
