"""Records which experts the tokens select while a server runs, and writes it to files.

On a GPU, a kernel counts (`kt_kernel.device.route_kernel`), and nothing waits for it: it leaves its
totals in pinned memory, which a thread of this module reads. Engine processes are often killed, so
the thread writes the files when there are no new tokens, and every few seconds while there are.
"""

from __future__ import annotations

import logging
import multiprocessing.util
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..moe.routing import without_padding
from ..routes.model import RoutedModel
from ..routes.record import RouteRecord
from ..routes.statistics import ExpertStatistics
from ..runtime.background import start_thread
from ..runtime.forks import per_process
from ..runtime.streams import on_stream
from .option_table import ROUTES_TOKENS
from .options import KTOptions

LOOK_SECONDS = 0.5  # files are written when there was nothing new for this long
WRITE_SECONDS = 5.0  # and this often otherwise
_GROWTH = 1.25  # in between, a record is only written once it has grown by this factor

_logger = logging.getLogger(__name__)
_recordings: list[ModelRecording] = []


class ModelRecording:
    """Counts and routes of one model's layers in this process.

    model: its identity, kept in the files. Call `add_layer` for each layer, then `start`.
    """

    _lock: threading.RLock

    def __init__(self, options: KTOptions, model: RoutedModel) -> None:
        self.model = model
        self.layers: list[LayerRecording] = []
        self._stats_path = options.record_kt_gpu_expert_distribution
        self._routes_path = options.record_kt_expert_routes
        self.capacity = 0  # tokens whose routes are kept
        if self._routes_path is not None:
            self.capacity = options.expert_routes_tokens or ROUTES_TOKENS
        self._saved_tokens = self._saved_routes = 0
        self._began = False
        self._stop = threading.Event()
        per_process(self, "_lock", threading.RLock)

    def add_layer(self, layer_idx: int) -> LayerRecording:
        layer = LayerRecording(self, layer_idx)
        self.layers.append(layer)
        return layer

    def start(self, owner: object) -> None:
        """Prepares writing the files: from `begin` on, the last time when the owner is deleted or
        the process ends."""
        _recordings.append(self)
        start_thread("kt-record", self._run, self._stop.set)
        # Also runs at the end of child processes, where atexit does nothing.
        multiprocessing.util.Finalize(owner, self._close, exitpriority=100)

    def _run(self) -> None:
        written, seen = time.monotonic(), 0
        while not self._stop.wait(LOOK_SECONDS):
            tokens = self._tokens()
            idle, seen = tokens == seen, tokens
            if idle or time.monotonic() - written >= WRITE_SECONDS:
                self.save(complete=idle)
                written = time.monotonic()

    def _close(self) -> None:
        self._stop.set()
        self.save(complete=True)
        _recordings.remove(self)

    def begin(self) -> None:
        """Forgets what was counted so far: the dummy batches of an engine's start. Nothing is
        written before this call."""
        for layer in self.layers:
            layer.clear()
        self._saved_tokens = self._saved_routes = 0
        self._began = True

    @property
    def began(self) -> bool:
        """Whether `begin` was called."""
        return self._began

    def _tokens(self) -> int:
        return min(layer.tokens for layer in self.layers)

    def statistics(self) -> ExpertStatistics:
        """What was counted so far; zeros before the first batch."""
        layers = sorted(self.layers, key=lambda layer: layer.layer_idx)
        totals = np.stack([layer.totals(self.model.num_experts) for layer in layers])
        experts = self.model.num_experts
        return ExpertStatistics(
            self.model,
            tuple(layer.layer_idx for layer in layers),
            totals[:, :experts].astype(np.float64),
            totals[:, experts].astype(np.float64),
        )

    def routes(self) -> RouteRecord:
        """The routes recorded so far: those of the tokens that all layers have seen."""
        layers = sorted(self.layers, key=lambda layer: layer.layer_idx)
        found = [layer.routes() for layer in layers]
        count = min(len(passes) for _, passes in found)
        return RouteRecord(
            self.model,
            tuple(layer.layer_idx for layer in layers),
            np.stack([routes[:count] for routes, _ in found], axis=1),
            found[0][1][:count].astype(np.int64),
        )

    def save(self, complete: bool = True) -> None:
        """Writes the files that have something new, once `begin` was called. complete: otherwise,
        a record is only written if it has grown much. If a file cannot be written, logs a
        warning."""
        with self._lock:
            tokens = self._tokens()
            if not self._began:
                return
            if self._stats_path is not None and tokens != self._saved_tokens:
                _write(self._stats_path, self.statistics().save)
                self._saved_tokens = tokens
            kept, saved = min(tokens, self.capacity), self._saved_routes
            complete = complete or kept == self.capacity or kept >= saved * _GROWTH
            if self._routes_path is not None and kept != saved and complete:
                _write(self._routes_path, self.routes().save)
                self._saved_routes = kept


class LayerRecording:
    """Counts and routes of one layer."""

    def __init__(self, model: ModelRecording, layer_idx: int) -> None:
        self.layer_idx = layer_idx
        self._experts, self._capacity = model.model.num_experts, model.capacity
        self._width = 0  # experts per token, as the engine passes them
        self._device: torch.device | None = None
        self._on_device: torch.Tensor | None = None

    def add(self, ids: torch.Tensor, padding: torch.Tensor | None, stream: Any = None) -> None:
        """Counts a batch. ids: [T, k]. padding: see `routing.need_padding`. stream: of the device,
        None for the current one.

        Raises RuntimeError for another device or k than in earlier batches.
        """
        if self._device is None:
            self._allocate(ids)
        if ids.device != self._device or ids.shape[1] != self._width:
            raise RuntimeError(
                f"layer {self.layer_idx}: routes [{ids.shape[0]}, {ids.shape[1]}] on {ids.device} "
                f"cannot be recorded; earlier ones had {self._width} columns, on {self._device}"
            )
        if not ids.shape[0]:
            return
        if self._on_device is None:
            self._add_on_cpu(without_padding(ids, padding))
        else:
            with on_stream(ids.device, stream):
                launch(ids.contiguous(), padding, self._on_device, self._host, self._capacity)

    def _allocate(self, ids: torch.Tensor) -> None:
        """Makes the memory, which is impossible while a CUDA graph is captured."""
        gpu = ids.is_cuda
        self._width = ids.shape[1]
        kept = max(1, self._capacity)  # a kernel's arguments cannot be empty
        # Tensors of inference mode could not be changed outside of it.
        with torch.inference_mode(False), torch.device("cpu"):
            self._host = (
                torch.zeros(self._experts + 2, dtype=torch.int64, pin_memory=gpu),
                torch.empty(kept, self._width, dtype=torch.int16, pin_memory=gpu),
                torch.empty(kept, dtype=torch.int32, pin_memory=gpu),
            )
        if gpu:
            with torch.inference_mode(False):
                self._on_device = torch.zeros_like(self._host[0], device=ids.device)
        self._device = ids.device  # last: the thread may look at the layer

    def _add_on_cpu(self, ids: torch.Tensor) -> None:
        totals, routes, passes = (tensor.numpy() for tensor in self._host)
        given = ids.numpy()
        known = (given >= 0) & (given < self._experts)
        is_token = known.any(axis=1)
        first = int(totals[self._experts])
        kept = np.where(known, given, -1)[is_token][: max(0, self._capacity - first)]
        routes[first : first + len(kept)] = kept
        passes[first : first + len(kept)] = totals[-1]
        totals[: self._experts] += np.bincount(given[known], minlength=self._experts)
        totals[self._experts] += is_token.sum()
        totals[-1] += 1

    def clear(self) -> None:
        """Sets everything to 0, after all batches so far."""
        if self._device is None:
            return
        if self._on_device is not None:
            torch.cuda.synchronize(self._device)
            with torch.inference_mode():
                self._on_device.zero_()
            torch.cuda.synchronize(self._device)
        self._host[0].zero_()

    @property
    def tokens(self) -> int:
        """Tokens counted so far."""
        return 0 if self._device is None else int(self._host[0][self._experts])

    def totals(self, experts: int) -> np.ndarray:
        """int64 [E + 1]: of each expert, and tokens; a copy."""
        if self._device is None:
            return np.zeros(experts + 1, np.int64)
        return self._host[0].numpy()[: experts + 1].copy()

    def routes(self) -> tuple[np.ndarray, np.ndarray]:
        """Routes int16 [T, k] and passes int32 [T] of the tokens that were kept; copies."""
        if self._device is None:
            return np.empty((0, 1), np.int16), np.empty(0, np.int32)
        count = min(self.tokens, self._capacity)
        return self._host[1].numpy()[:count].copy(), self._host[2].numpy()[:count].copy()


def launch(
    ids: torch.Tensor,
    padding: torch.Tensor | None,
    totals: torch.Tensor,
    host: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    capacity: int,
    fence: bool = True,
) -> None:
    """Starts `count_routes` on the current stream. fence: False in Triton's interpreter."""
    from ..device.route_kernel import constants, count_routes  # Triton may be missing

    if padding is not None and padding.dtype == torch.bool:
        padding = padding.view(torch.uint8)
    count_routes[(1,)](
        ids,
        ids if padding is None else padding,
        totals,
        *host,
        ids.shape[0],
        capacity,
        **constants(len(totals) - 2, ids.shape[1]),
        PADDED=padding is not None,
        FENCE=fence,
    )


def begin() -> None:
    """Begins the recordings of all models of this process, see `ModelRecording.begin`. Called at
    the end of an engine's start."""
    for recording in list(_recordings):
        if not recording.began:  # another engine of this process may be recording already
            recording.begin()


def _write(path: str, save: Callable[[str], None]) -> None:
    try:
        save(path)
    except Exception as error:  # the thread goes on, and tries again
        reason = getattr(error, "strerror", None) or error
        _logger.warning("kt: %s: cannot be written: %s", path, reason)
