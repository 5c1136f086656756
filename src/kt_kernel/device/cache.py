"""Experts that move between the CPU and slots on the GPU while a model runs: the device's part.

Exactly once. A layer has one map on the device, from experts to slots. `begin_pass` is the only
kernel that writes it, and it runs on the stream of the layer's batches, before each of them. The
kernel that hands a batch over reads the map once for each route, and both sides follow from that
one value: a route with a slot goes to the engine's kernels and not to the CPU, any other goes to
the CPU and not to the engine's kernels. So every route is computed once, whatever the map contains.

Slots are overwritten only while no kernel can read them. The host publishes maps; the device takes
the latest into use at the layer's next batch and then states its number. Everything that used an
older map is earlier on that stream, so a slot that this map and all later ones do not contain is
free. Its new weights are complete before the host publishes a map that contains it. The host may
publish while the device copies: then the device has some rows of a later map and states the earlier
number, which only delays when a slot counts as free.

Addresses never change, so all of this works in CUDA graphs.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..runtime.streams import on_stream
from ..runtime.variant import native
from .backend import cuda_context

TOKENS, ROUTES, HITS, VERSION, NUMBERS = range(5)  # of a layer, after the values of its experts


class Totals:
    """What `begin_pass` has counted in each layer. values: int64 [L, E + 4]."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.uses, numbers = values[:, :-NUMBERS], values[:, -NUMBERS:]
        self.tokens, self.routes = numbers[:, TOKENS], numbers[:, ROUTES]
        self.hits, self.versions = numbers[:, HITS], numbers[:, VERSION]


class CacheMemory:
    """The maps and counters of some layers with equally many experts.

    Attributes:
        live: int32 [L, E] on the device, the maps that batches read.
        wanted, versions: int32 [L, E] and [L] on the host, what `publish` publishes.
        passed: int64 [L] on the host: tokens of each layer's batches so far, or a moment ago.
        counted: on the host, what the device had counted when ``fetch`` ran last, or has.
        fetch: the compiled core's SyncedCopies of the counters, if they are on a device.
    """

    counted: Totals
    fetch: Any = None

    def __init__(self, device: torch.device, layers: int, experts: int) -> None:
        pinned = device.type == "cuda"
        self.device = device
        # Tensors of inference mode could not be changed outside of it.
        with torch.inference_mode(False), torch.device("cpu"):
            self._wanted = torch.full((layers, experts), -1, dtype=torch.int32, pin_memory=pinned)
            self._versions = torch.zeros(layers, dtype=torch.int32, pin_memory=pinned)
            size = experts + NUMBERS
            self._passed = torch.zeros(layers, dtype=torch.int64, pin_memory=pinned)
        self.wanted, self.versions = self._wanted.numpy(), self._versions.numpy()
        self.passed = self._passed.numpy()
        with torch.inference_mode(False):
            self.live = torch.full((layers, experts), -1, dtype=torch.int32, device=device)
            self._totals = torch.zeros(layers, size, dtype=torch.int64, device=device)

    def begin_pass(
        self, layer: int, ids: torch.Tensor, padding: torch.Tensor | None, stream: Any = None
    ) -> None:
        """Takes the published map of a layer into use, and counts a batch. Call it before the batch
        is handed over, on its stream. ids: [T, k]; padding: see `routing.need_padding`."""
        raise NotImplementedError

    def publish(self) -> None:
        """Gives the device the wanted maps. Each layer whose map changed has a new version."""
        raise NotImplementedError

    def totals(self) -> Totals:
        """What the device has counted so far; valid until the next call."""
        if self.fetch is not None:
            self.fetch.run()
        return self.counted

    def clear(self) -> None:
        """Sets the counts to 0, after all batches so far; the maps stay."""
        raise NotImplementedError


class CudaCache(CacheMemory):
    """On a GPU. Only one thread at a time may call methods other than `begin_pass`."""

    def __init__(self, device: torch.device, layers: int, experts: int) -> None:
        super().__init__(device, layers, experts)
        with torch.inference_mode(False):
            self._published = torch.full_like(self.live, -1)
            self._numbers = torch.zeros(layers, dtype=torch.int32, device=device)
            self._counted = torch.zeros_like(
                self._totals, device="cpu", pin_memory=device.type == "cuda"
            )
        self.counted = Totals(self._counted.numpy())
        self._stream = torch.cuda.Stream(device)
        context = cuda_context(device)

        def copies(*pairs: tuple[torch.Tensor, torch.Tensor]) -> list[tuple[int, int, int]]:
            return [(to.data_ptr(), source.data_ptr(), source.nbytes) for to, source in pairs]

        made, stream = native().SyncedCopies, self._stream.cuda_stream
        back = copies((self._counted, self._totals))
        self.fetch = made(context, stream, to_device=[], to_host=back)
        # The numbers have a copy of their own: in the order of the stream, it is later than the
        # maps.
        there = copies((self._published, self._wanted), (self._numbers, self._versions))
        self._publish = made(context, stream, to_device=there, to_host=[])
        torch.cuda.synchronize(device)

    def begin_pass(
        self, layer: int, ids: torch.Tensor, padding: torch.Tensor | None, stream: Any = None
    ) -> None:
        with on_stream(ids.device, stream):
            launch(
                ids.contiguous(),
                padding,
                self.live[layer],
                self._published[layer],
                self._numbers[layer:],
                self._totals[layer],
                self._passed[layer:],
            )

    def publish(self) -> None:
        self._publish.run()  # until then, the host must not change them

    def clear(self) -> None:
        torch.cuda.synchronize(self.device)
        with torch.inference_mode(False):
            self._totals[:, : -(NUMBERS - VERSION)] = 0
        torch.cuda.synchronize(self.device)


class HostCache(CacheMemory):
    """For an engine on the CPU, where every call computes at once."""

    def __init__(self, device: torch.device, layers: int, experts: int) -> None:
        super().__init__(device, layers, experts)
        self.counted = Totals(self._totals.numpy())

    def begin_pass(
        self, layer: int, ids: torch.Tensor, padding: torch.Tensor | None, stream: Any = None
    ) -> None:
        launch(
            ids.contiguous(),
            padding,
            self.live[layer],
            self._wanted[layer],
            self._versions[layer:],
            self._totals[layer],
            self._passed[layer:],
            run=_on_host,
        )

    def publish(self) -> None:
        """The device reads the host's memory."""

    def clear(self) -> None:
        self._totals[:, : -(NUMBERS - VERSION)] = 0


def allow_captures_elsewhere() -> None:
    """The calling thread may use CUDA while another one captures a graph. Otherwise its calls would
    end the capture."""
    with contextlib.suppress(OSError, AttributeError):  # captures after the start are rare
        driver, relaxed = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(2)
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


def launch(
    ids: torch.Tensor,
    padding: torch.Tensor | None,
    live: torch.Tensor,
    wanted: torch.Tensor,
    version: torch.Tensor,
    totals: torch.Tensor,
    passed: torch.Tensor,
    run: Callable[..., None] | None = None,
) -> None:
    """Starts `cache_kernel.begin_pass` on the current stream, or ``run`` in its place."""
    if padding is not None and padding.dtype == torch.bool:
        padding = padding.view(torch.uint8)
    if run is not None:
        run(ids, padding, live, wanted, version, totals, passed)
        return
    from .cache_kernel import begin_pass, constants  # Triton may be missing

    begin_pass[(1,)](
        ids,
        ids if padding is None else padding,
        live,
        wanted,
        version,
        totals,
        passed,
        ids.shape[0],
        **constants(len(live), ids.shape[1]),
        PADDED=padding is not None,
    )


def _on_host(
    ids: torch.Tensor,
    padding: torch.Tensor | None,
    live: torch.Tensor,
    wanted: torch.Tensor,
    version: torch.Tensor,
    totals: torch.Tensor,
    passed: torch.Tensor,
) -> None:
    """The kernel's work on the CPU."""
    found = Totals(totals.numpy()[None])
    published = int(version[0])  # read once, and before the map: the host may publish meanwhile
    if found.versions[0] != published:
        live.copy_(wanted)
        found.versions[0] = published
    given = ids.numpy().astype(np.int64)
    known = (given >= 0) & (given < len(live))
    if padding is not None:
        pads = padding.numpy()
        known &= ((pads >= 0) if pads.dtype == np.int64 else (pads == 0))[:, None]
    used = given[known]
    np.add.at(found.uses[0], used, 1)
    found.tokens += len(given)
    passed[0] = int(found.tokens[0])
    found.routes += len(used)
    found.hits += int((live.numpy()[used] >= 0).sum())
