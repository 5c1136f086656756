"""Memory of calls in flight: snapshots of their inputs, and references that keep it alive.

The compiled core works on addresses. The process, not the wrapper, holds everything that an
unfinished call points to, so neither an exception nor a deleted wrapper frees memory too early.
"""

from __future__ import annotations

import atexit
import contextlib
import operator
import os
import sys
import threading
from collections.abc import Hashable, Iterable
from typing import Any

import torch

_lock = threading.Lock()
_generation = 0  # grows in a forked child, where calls of the parent are lost


class Call:
    """One job submitted to a team, with everything that it reads and writes."""

    def __init__(self, *keep: Any, snapshot: Snapshot | None = None) -> None:
        self._keep = keep
        self._snapshot = snapshot
        self._ticket: Any = None
        self._generation = _generation

    def start(self, submit: Any, *arguments: Any) -> None:
        """Runs ``submit(*arguments)`` and keeps the memory until the job is done."""
        with _lock:
            if self._snapshot is not None:
                self._snapshot.users += 1
            _in_flight.add(self)
        try:
            self._ticket = submit(*arguments)
        except BaseException:
            with _lock:
                self._retire()
            raise

    def wait(self) -> None:
        """Blocks until the job is done. RuntimeError if it was submitted before a fork."""
        if self._generation != _generation:
            raise RuntimeError("this call was submitted before the process forked and is lost")
        self._ticket.wait()
        with _lock:
            self._retire()

    def finished(self) -> bool:
        return self._ticket is not None and self._ticket.done

    def _retire(self) -> None:
        _in_flight.discard(self)
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            _drop(snapshot)


class Snapshot:
    """Host copies of a call's inputs: x [T, H], ids int64 [T, k], weights float32 [T, k]."""

    def __init__(self, key: Hashable, tokens: int, hidden: int, k: int, dtype: torch.dtype) -> None:
        self.key = key
        self.tokens = tokens
        self.users = 0  # unfinished calls, and whoever fills it
        # device="cpu" spelled out: engines build and run models under a device context.
        with torch.inference_mode(False):  # or they could not be written outside of it
            self.x = torch.empty((tokens, hidden), dtype=dtype, device="cpu")
            self.ids = torch.empty((tokens, k), dtype=torch.int64, device="cpu")
            self.weights = torch.empty((tokens, k), dtype=torch.float32, device="cpu")

    def copy_of(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Fills the buffers from tensors of any device, and returns them."""
        self.x.copy_(x)
        self.ids.copy_(ids)
        self.weights.copy_(weights)
        return self.x, self.ids, self.weights

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + self.ids.nbytes + self.weights.nbytes


class _Kept:
    """Reusable buffers, by key.

    Of the keys whose batch size was not announced, only the latest is kept; otherwise this would
    grow with every prompt length. Keys in ``for_ever`` always stay.
    """

    def __init__(self) -> None:
        self.for_ever: set[Hashable] = set()
        self._entries: dict[Hashable, tuple[int, list[Any]]] = {}
        self._last_other: Hashable = None

    def get(self, key: Hashable) -> list[Any]:
        """The buffers of ``key``, to take from; empty if there are none."""
        return self._entries[key][1] if key in self._entries else []

    def for_adding(self, key: Hashable, tokens: int) -> list[Any]:
        """The list of ``key``, to add to; drops other keys that are not worth keeping."""
        if tokens not in _capture_batch_sizes and key != self._last_other:
            self._last_other = key
            self.drop_others()
        return self._entries.setdefault(key, (tokens, []))[1]

    def drop_others(self) -> None:
        for key, (tokens, _) in list(self._entries.items()):
            if tokens not in _capture_batch_sizes and key != self._last_other:
                self._drop(key)

    def clear(self) -> int:
        """Drops all buffers; returns their bytes."""
        return sum(self._drop(key) for key in list(self._entries))

    def _drop(self, key: Hashable) -> int:
        if key in self.for_ever:
            return 0
        return sum(buffer.nbytes for buffer in self._entries.pop(key)[1])


_in_flight: set[Call] = set()
_free = _Kept()  # snapshots
_results = _Kept()  # pairs of device buffers, next one first
_capture_batch_sizes: list[int] = []

_KEPT_PER_KEY = 2


def generation() -> int:
    """Grows with every fork: the result of a call of another generation will never arrive."""
    return _generation


def reap() -> None:
    """Releases the memory of finished calls that nobody waits for."""
    with _lock:
        for call in [call for call in _in_flight if call.finished()]:
            call._retire()


def take_snapshot(
    owner: Hashable, tokens: int, hidden: int, k: int, dtype: torch.dtype, device: torch.device
) -> Snapshot:
    """Unused input buffers for a batch of ``owner`` that comes from ``device``.

    They belong to the caller, and to the calls started on them, until ``release_snapshot``.
    """
    key = owner, tokens, hidden, k, dtype, device
    reap()
    with _lock:
        kept = _free.get(key)
        snapshot = kept.pop() if kept else None
    if snapshot is None:
        snapshot = Snapshot(key, tokens, hidden, k, dtype)
    snapshot.users = 1
    return snapshot


def release_snapshot(snapshot: Snapshot) -> None:
    """The caller of ``take_snapshot`` no longer needs the buffers."""
    with _lock:
        _drop(snapshot)


def _drop(snapshot: Snapshot) -> None:
    snapshot.users -= 1
    if snapshot.users == 0:
        _store(snapshot)


def _store(snapshot: Snapshot) -> None:
    kept = _free.for_adding(snapshot.key, snapshot.tokens)
    if len(kept) < _KEPT_PER_KEY:
        kept.append(snapshot)


def device_result(
    owner: Hashable,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    capturing: bool = False,
) -> torch.Tensor | None:
    """A device buffer [T, H] for a result of ``owner``, valid until the next-but-one call with the
    same arguments.

    capturing: a graph is being captured. It will write to the buffer at each replay, so the pair is
    kept forever. Returns None if there is no pair yet.
    """
    key = owner, shape, dtype, device
    with _lock:
        if capturing:
            if not _results.get(key):
                return None
            _results.for_ever.add(key)
        pair = _results.for_adding(key, shape[0])
        if not pair:
            with torch.inference_mode(False):
                pair += [torch.empty(shape, dtype=dtype, device=device) for _ in range(2)]
        pair.reverse()
        return pair[1]


def set_capture_batch_sizes(sizes: Iterable[int]) -> None:
    """Announces the batch sizes whose buffers should be kept.

    Raises:
        ValueError: a size that is not a positive integer.
    """
    checked = []
    for size in sizes:
        try:
            number = 0 if isinstance(size, bool) else operator.index(size)
        except TypeError:
            number = 0
        if number < 1:
            raise ValueError(f"capture batch sizes must be positive integers, got {size!r}")
        checked.append(number)
    with _lock:
        _capture_batch_sizes[:] = checked
        for kept in (_free, _results):
            kept.drop_others()


def get_capture_batch_sizes() -> list[int]:
    """The sizes given to ``set_capture_batch_sizes``."""
    return list(_capture_batch_sizes)


def clear_buffer_cache() -> int:
    """Frees the buffers that no pending call uses; returns their bytes."""
    reap()
    with _lock:
        freed = _free.clear() + _results.clear()
    engine = sys.modules.get("kt_kernel.device.engine")  # not loaded before a GPU is used
    return freed + (engine.clear_banks() if engine is not None else 0)


def _finish_all() -> None:
    # At exit, tensors are freed before threads end; unfinished jobs would write to freed memory.
    for call in list(_in_flight):
        with contextlib.suppress(Exception):
            call.wait()


def _forget_after_fork() -> None:
    global _lock, _generation
    _lock = threading.Lock()
    _generation += 1
    _in_flight.clear()
    _free.clear()


atexit.register(_finish_all)
os.register_at_fork(after_in_child=_forget_after_fork)
