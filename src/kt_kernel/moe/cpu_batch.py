"""A batch from the CPU's memory to its experts: its snapshot, its jobs and its result.

For tensors on the CPU, and for those of a device that cannot hand over a batch itself. The
counterpart for devices that can is ``device.layer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.streams import on_stream
from ..runtime.tensors import DTYPES, on_cpu
from . import buffers
from .batch_checks import Inputs, Like
from .routing import select_deferred_experts, without_padding


@dataclass(slots=True, eq=False)
class CpuBatch:
    """A started batch."""

    out: torch.Tensor  # [T, H] on the CPU, the dtype of the hidden states; there after ``call``
    call: buffers.Call | None  # None: no tokens
    device: torch.device  # of the hidden states, where the result goes
    owner: int  # number of the model's chain, whose layers share buffers on the device

    def collect(self, cuda_stream: Any) -> torch.Tensor:
        """Waits for the CPU's sum and returns it, [T, H] on the device of the hidden states."""
        if self.call is not None:
            self.call.wait()
        if self.device.type == "cpu":
            return self.out
        tokens, hidden_size = self.out.shape
        with on_stream(self.device, cuda_stream):
            result = buffers.device_result(
                self.owner, (tokens, hidden_size), self.out.dtype, self.device
            )
            assert result is not None  # only a capture can lack one
            result.copy_(self.out)
        return result

    def collect_and_add(
        self, hot: torch.Tensor | None, cuda_stream: Any, scale: float
    ) -> torch.Tensor:
        """Returns scale * (the CPU's sum + hot) [T, H], which belongs to the caller."""
        total = self.collect(cuda_stream)
        with on_stream(self.device, cuda_stream):
            if hot is not None:
                total = hot + total
            elif self.device.type != "cpu":
                total = total.clone()  # the buffer will serve again
            return total if scale == 1.0 else total * scale


def start(
    core: Any,
    owner: int,
    like: Like,
    inputs: Inputs,
    cuda_stream: Any,
    copy: bool,
    padding: torch.Tensor | None,
    protected_k: int,
    add: torch.Tensor | None,
) -> tuple[CpuBatch, torch.Tensor | None]:
    """Starts the experts on a batch and returns at once.

    Args:
        core: the compiled MoeLayer.
        owner: number of the model's chain.
        inputs: checked, and what ``like`` describes.
        copy: whether inputs on the CPU must be copied. They are in any case if experts are
            deferred; inputs on a device always are.
        padding: a mask [T] of rows that are not computed, see `routing.need_padding`.
        protected_k: how many routes of a token are not deferred; k: all.
        add: float32 [T, H], the sum that the previous layer deferred to this one.

    Returns:
        The batch, and a float32 [T, H] that will hold the sum of the deferred experts (None: there
        are none). It is complete before a later job of the same pools starts.
    """
    tokens, dtype, device = like
    x, ids, weights = inputs
    hidden_size, k = x.shape[-1], ids.shape[-1]
    out = torch.empty((tokens, hidden_size), dtype=dtype, device="cpu")
    if not tokens:
        return CpuBatch(out, None, device, owner), None
    deferred = partial = snapshot = None
    try:
        with on_stream(device, cuda_stream):
            x = x.detach().reshape(tokens, hidden_size)
            ids = ids.detach().reshape(tokens, k)
            weights = weights.detach().reshape(tokens, k)
            if padding is not None:
                ids = without_padding(ids, padding)
            if copy or protected_k < k or device.type != "cpu":
                snapshot = buffers.take_snapshot(owner, tokens, hidden_size, k, dtype, device)
                x, ids, weights = snapshot.copy_of(x, ids, weights)
            else:
                x, ids = on_cpu(x), on_cpu(ids, torch.int64)
                weights = on_cpu(weights, torch.float32)
        if protected_k < k:
            ids, deferred = select_deferred_experts(ids, weights, protected_k)
        call = _start_job(core, snapshot, x, ids, weights, out, add, None)
        if deferred is not None and bool((deferred >= 0).any()):
            partial = torch.empty(out.shape, dtype=torch.float32, device="cpu")
            _start_job(core, snapshot, x, deferred, weights, None, None, partial)
    finally:
        if snapshot is not None:
            buffers.release_snapshot(snapshot)
    return CpuBatch(out, call, device, owner), partial


def _start_job(
    core: Any, snapshot: buffers.Snapshot | None, x: torch.Tensor, *others: torch.Tensor | None
) -> buffers.Call:
    """Queues out [T, H] = the experts' sum + add, or partial = the sum in float32.

    others: ids and weights [T, k], out, add, partial; None: not wanted.
    """
    call = buffers.Call(core, x, *others, snapshot=snapshot)
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in others)
    call.start(core.submit, x.data_ptr(), DTYPES[x.dtype], x.shape[0], *addresses)
    return call
