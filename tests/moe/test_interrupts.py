"""A signal's handler that raises, as Python's own does for Ctrl-C, while a batch is started."""

from __future__ import annotations

import ctypes
import signal
from functools import partial

import pytest
import torch

from kt_kernel import KTMoEWrapper
from kt_kernel.moe import buffers
from kt_kernel.runtime.tensors import DTYPES

E, K, H, I, TOKENS = 4, 4, 512, 1024, 4096  # noqa: E741


class Interrupted(BaseException):
    """In the place of KeyboardInterrupt, which would end the tests."""


class Interrupting:
    """A null address. A signal comes while compiled code converts it, so the handler runs when that
    code has returned, but before the caller has its result."""

    __index__ = partial(ctypes.CDLL(None)["raise"], int(signal.SIGUSR1))


def interrupt(number: int, frame: object) -> None:
    raise Interrupted


def test_the_memory_of_a_batch_whose_start_was_interrupted():
    """The experts no longer write to it when the caller can let go of it."""
    layer = KTMoEWrapper(
        layer_idx=0,
        num_experts=E,
        num_experts_per_tok=K,
        hidden_size=H,
        moe_intermediate_size=I,
        num_gpu_experts=0,
        cpuinfer_threads=1,
        method="BF16",
    )
    gate, up, down = torch.randn(E, I, H), torch.randn(E, I, H), torch.randn(E, H, I)
    layer.load_weights_from_tensors(gate, up, down, torch.arange(E))
    x = torch.randn(TOKENS, H, dtype=torch.bfloat16)
    ids, weights = torch.arange(K).repeat(TOKENS, 1), torch.ones(TOKENS, K)
    expected = layer.forward(x, ids, weights, None)

    out = torch.zeros_like(x)
    call = buffers.Call(x, ids, weights, out)
    arguments = x.data_ptr(), DTYPES[x.dtype], TOKENS, *(t.data_ptr() for t in (ids, weights, out))
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupted):
            call.start(layer._core.submit, *arguments, Interrupting())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert torch.equal(out, expected), "the experts still compute, or never began"
    assert call not in buffers._in_flight
