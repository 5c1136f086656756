"""The state of a device: polling thread and ring of the compiled core, kernels, and banks."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import threading
import time
import weakref
from collections import deque
from typing import Any

import torch

from ..runtime.forks import per_process
from ..runtime.machine import usable_cores
from ..runtime.pools import cores_for_serving, log_once, too_many_threads
from ..runtime.variant import native
from ..trace.writer import TRACE_VARIABLE
from . import backend as cuda
from .bank import Bank, BankKey
from .tracer import tracer_of

WATCHDOG_VARIABLE = "KT_WATCHDOG_SECONDS"
_WATCHDOG_SECONDS = 300.0
_ENTRIES = 4096  # of the ring: a power of two, far above kernels.ROOM_CHECK
_DRAIN_SECONDS = 5.0
_SMALLEST_BANK = 16

_logger = logging.getLogger("kt_kernel.device")
_engines: dict[torch.device, DeviceEngine | None] = {}  # None: the device does not support it
_lock = threading.Lock()


class DeviceEngine:
    """The shared state of the layers on one device. ``core`` is the compiled StreamEngine."""

    _lock: threading.RLock

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.counter = torch.zeros(1, dtype=torch.int32, device=backend.device)
        path = os.environ.get(TRACE_VARIABLE)
        self.core = native().StreamEngine(_ENTRIES, watchdog_seconds(), traces=bool(path))
        backend.pin(self.core.buffer)
        # A trace measures how long the kernel waits; otherwise the stream waits before it.
        self.waits = not path and self._stream_waits()
        # The last step that may fail, because it has a thread and a file.
        self.tracer = tracer_of(backend.device)
        if self.tracer is not None:
            self.tracer.attach(self.core)
        self.launches: dict[Any, Any] = {}  # compiled kernels, by what they were compiled for
        # By the number of the chain that uses them, and by their keys without a capacity.
        self._banks: dict[int, dict[BankKey, list[Bank]]] = {}
        self._captured: list[Bank] = []  # of any chain, existing or not: kept forever
        self._gone: deque[int] = deque()  # deleted chains whose banks are still to be sorted out
        self._idle: list[Bank] = []  # banks of deleted chains
        per_process(self, "_lock", threading.RLock)

    def _stream_waits(self) -> bool:
        """Whether the device's streams can wait for a word in pinned memory; a warning if not."""
        try:
            self.backend.wait(self.core.head_address, 0)  # true: nothing was taken yet
        except RuntimeError as error:
            _logger.warning(
                "kt: %s: streams cannot wait for the CPU (%s), so kernels wait instead; while this "
                "process is stopped, they slow down other processes on the GPU",
                self.backend.device,
                error,
            )
            return False
        return True

    def banks(self, chain: Any, key: BankKey) -> list[Bank]:
        """The banks of a chain, smallest first; the list grows with `add_bank`."""
        with self._lock:
            kinds = self._banks.get(chain.number)
            if kinds is None:
                kinds = self._banks[chain.number] = {}
                # Called by any thread, at any moment: no more than this.
                end = weakref.finalize(chain, self._gone.append, chain.number)
                end.atexit = False
            return kinds.setdefault(key, [])

    def add_bank(
        self, banks: list[Bank], key: BankKey, smallest: int, tokens: int, capturing: bool
    ) -> Bank:
        """Adds a bank for ``tokens`` tokens, more than the existing banks have room for.

        RuntimeError while a graph is captured, or if there is not enough memory.
        """
        if capturing:
            raise RuntimeError(
                f"{self.backend.device}: a batch of {tokens} tokens is captured in a CUDA graph "
                "but has no memory yet; run a batch of that size once before the capture, or "
                "announce it with set_capture_batch_sizes before the first batch"
            )
        capacity = max(smallest, _SMALLEST_BANK)
        while capacity < tokens:
            capacity *= 2
        wanted = key._replace(capacity=capacity)
        with self._lock:
            self._sort_out()
            bank = next((bank for bank in self._idle if bank.key == wanted), None)
            if bank is not None:
                self._idle.remove(bank)
                self.backend.synchronize()  # its last user may have left work in flight
            else:
                bank = Bank(self.backend, wanted)
            banks.append(bank)
        return bank

    def keep_for_ever(self, bank: Bank) -> None:
        """Called if a graph captures the bank's addresses: deleting a graph gives no notice."""
        if not bank.captured:
            bank.captured = True
            self._captured.append(bank)

    def _sort_out(self) -> None:
        while self._gone:
            for banks in self._banks.pop(self._gone.popleft(), {}).values():
                self._idle += [bank for bank in banks if not bank.captured]

    def clear(self) -> int:
        """Frees banks that no chain uses and no graph has captured; returns their bytes."""
        with self._lock:
            self._sort_out()
            if not self._idle or self.backend.capturing():
                return 0
            self.backend.synchronize()
            idle, self._idle = self._idle, []
            freed = sum(bank.nbytes for bank in idle)
            for bank in idle:
                bank.free()
            return freed

    def warn_of_threads(self, threads: int) -> None:
        """Logs once if this many CPU threads leave no core to the threads that serve the device."""
        reserved = cores_for_serving(usable_cores())
        log_once(_logger, too_many_threads(threads, reserved=reserved))

    def stop(self) -> None:
        """Ends the polling thread once all launched batches are answered. If that takes too long,
        the thread continues until the process ends."""
        end = time.monotonic() + _DRAIN_SECONDS
        with contextlib.suppress(Exception):
            while not self.backend.idle() and time.monotonic() < end:
                time.sleep(0.001)
        if self.core.drain(max(end - time.monotonic(), 0.1)):
            self.core.stop()
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.core))  # its destructor would wait
        if self.tracer is not None:
            self.tracer.close()


def watchdog_seconds() -> float:
    """How long a layer may take before it counts as stuck, from KT_WATCHDOG_SECONDS.

    ValueError for anything but a number above 0.
    """
    given = os.environ.get(WATCHDOG_VARIABLE, "").strip()
    try:
        seconds = float(given) if given else _WATCHDOG_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{WATCHDOG_VARIABLE}={given}; accepted: seconds above 0, or unset")
    return seconds


def engine_of(device: torch.device) -> DeviceEngine | None:
    """The engine of a CUDA device, created at the first call. None, with a warning, if the device
    and the CPU cannot share pinned memory: batches are then copied, without graphs.

    Raises RuntimeError if the first call is captured in a graph, and torch.OutOfMemoryError.
    """
    with _lock:
        return _engines[device] if device in _engines else _make_engine(device)


def _make_engine(device: torch.device) -> DeviceEngine | None:
    backend = cuda.CudaBackend(device)
    if backend.capturing():
        raise RuntimeError(
            f"{device}: the very first batch is captured in a CUDA graph; run one before the "
            "capture, to create memory and kernels"
        )
    try:
        from . import kernels  # noqa: F401 - Triton may be missing

        _engines[device] = DeviceEngine(backend)
    except torch.OutOfMemoryError:
        raise  # there may be enough memory later
    except (RuntimeError, ImportError, OSError) as error:
        _engines[device] = None
        _logger.warning(
            "kt: %s: cannot use pinned memory (%s); batches are copied, which is slower "
            "and cannot be captured in CUDA graphs",
            device,
            error,
        )
    return _engines[device]


def clear_banks() -> int:
    """Calls `DeviceEngine.clear` on all devices; returns the bytes."""
    return sum(engine.clear() for engine in _engines.values() if engine is not None)


def _stop_all() -> None:
    for engine in _engines.values():
        if engine is not None:
            engine.stop()


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _engines.clear()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_forget_after_fork)
