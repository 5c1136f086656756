"""A device for streaming on the CPU: copies are done at once, and host memory needs no access."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from kt_kernel.device.streaming.experts import Run
from kt_kernel.device.streaming.routes import DividedRoutes
from kt_kernel.device.streaming.streamer import Group
from kt_kernel.device.streaming.timeline import Stamp
from kt_kernel.moe.activation import ExpertActivation
from kt_kernel.moe.routing import hot_routes
from kt_kernel.serving.activations import GPT_OSS, SILU

SKEW = 5_000_000_000  # of this device's clock, in nanoseconds


class _Event:
    def __init__(self) -> None:
        self.time = time.monotonic_ns() + SKEW

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return (other.time - self.time) / 1e6


class ImmediateLane:
    """A CopyLane without a stream."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.in_capture = False
        self.copied = 0  # bytes

    def capturing(self) -> bool:
        return self.in_capture

    def wait(self) -> None:
        pass

    def event(self) -> Any:
        return None

    def copy(self, to: torch.Tensor, source: torch.Tensor, runs: Sequence[Run]) -> None:
        for run in runs:
            rows = source[run.at : run.at + run.count]
            self.copied += to[run.to : run.to + run.count].copy_(rows).nbytes

    def order(self, event: Any) -> None:
        pass

    def stamp(self) -> Stamp:
        launched = time.monotonic_ns()
        return Stamp(_Event(), launched)

    stamp_copies = stamp_compute = stamp
    record_copies = delay_copies = record_compute = delay_compute = order


class Pins:
    """A CudaBackend's registration of host memory, at most ``limit`` times."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self.pinned: dict[int, int] = {}

    def pin(self, part: Any) -> None:
        if len(self.pinned) == self.limit:
            raise RuntimeError("cannot be pinned")
        self.pinned[part.address] = part.nbytes

    def unpin(self, part: Any) -> None:
        assert self.pinned.pop(part.address) == part.nbytes


def interleaves(activation: ExpertActivation) -> bool | None:
    """As vLLM's kernels."""
    return {SILU: False, GPT_OSS: True}.get(activation)


def products(
    x: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    group: Group,
    activation: ExpertActivation,
) -> torch.Tensor:
    """As an engine's kernels: every route with a slot, summed in float32, rounded once."""
    assert not weights[slots < 0].any()
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for slot in range(len(group.slots)):
        both, down = x.float() @ group.w13[slot].float().T, group.w2[slot].float().T
        if group.biases is not None:
            both += group.biases[0][slot]
        if activation == SILU:
            gate, up = both.chunk(2, 1)
            h = torch.nn.functional.silu(gate) * up
        else:
            limit = activation.swiglu_limit
            gate, up = both[:, ::2].clamp(max=limit), both[:, 1::2].clamp(-limit, limit)
            h = gate * torch.sigmoid(activation.swiglu_alpha * gate) * (up + 1)
        out = h.to(x.dtype).float() @ down
        if group.biases is not None:
            out += group.biases[1][slot]
        total += torch.where(slots == slot, weights.float(), 0).sum(1, keepdim=True) * out
    return total.to(x.dtype)


def hot_products(
    x: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    """The same of an engine's hot experts."""
    return products(x, slots, weights, Group(range(len(w13)), w13, w2), SILU)


def divide_routes(
    _: Any, ids: Any, weights: Any, slot_map: Any, places: Any, **given: Any
) -> DividedRoutes:
    """`kt_kernel.device.streaming.routes.divide_routes` where Triton cannot run."""
    signed = ids if ids.dtype.is_signed else ids.long()
    padding, room = given["padding"], given["room"]
    if given["live"]:
        places = places.masked_fill(slot_map >= 0, -1)
    of_all, shares = hot_routes(signed, weights, places, -1, padding)
    groups = []
    for begin in range(0, given["streamed"], room):
        slots = of_all - begin
        elsewhere = (of_all < 0) | (slots < 0) | (slots >= room)
        groups.append((slots.masked_fill(elsewhere, -1).int(), shares.masked_fill(elsewhere, 0)))
    hot = hot_routes(ids, weights, slot_map, given["cold_slot"], padding)
    return DividedRoutes(hot, signed.masked_fill(of_all >= 0, -1), groups)
