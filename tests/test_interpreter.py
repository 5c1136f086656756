"""What our GPU kernels ask of Triton's interpreter, which runs them in the tests.

A launch runs its programs one after the other, on the tensors' own memory. The interpreter has no
inline assembly, no ``globaltimer`` and no fence: a kernel takes them behind a constexpr flag.
"""

from __future__ import annotations

import os
import threading

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ["TRITON_INTERPRET"] == "0", reason="TRITON_INTERPRET=0: kernels are compiled"
)


@triton.jit
def _count(counter, tickets):
    ticket = tl.atomic_add(counter, 1, sem="acq_rel", scope="sys")
    tl.store(tickets + tl.program_id(0), ticket)


@triton.jit
def _publish(ring, slot, number):
    entry = (slot.to(tl.int64) << 32) | number.to(tl.uint32).to(tl.int64)
    tl.debug_barrier()
    tl.store(ring, entry)


@triton.jit
def _wait_and_copy(word, wanted, source, out, N: tl.constexpr, ON_GPU: tl.constexpr):
    word = word.to(tl.pointer_type(tl.int32))
    found = tl.load(word, volatile=True)
    while found != wanted:
        found = tl.load(word, volatile=True)
    if ON_GPU:
        tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.u32 $0, $1;", "=r,r", [found], tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()
    source = source.to(tl.pointer_type(tl.bfloat16))
    columns = tl.arange(0, N)
    tl.store(out + columns, tl.load(source + columns, mask=columns < N - 1, other=0.0))


def test_its_library_is_interpreted() -> None:
    """Which it is not if Triton was imported before TRITON_INTERPRET was set."""
    assert type(tl.sum) is type(_count)


def test_atomic_add() -> None:
    counter, tickets = torch.tensor([5], dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    _count[(8,)](counter, tickets)
    assert counter.item() == 13
    assert tickets.tolist() == list(range(5, 13))


@pytest.mark.parametrize("number", [1, 2**31 - 1, 2**31, 2**32 - 1])
def test_shift_in_64_bits(number: int) -> None:
    ring = torch.zeros(1, dtype=torch.int64)
    _publish[(1,)](ring, 9, number)
    assert ring.item() == (9 << 32) | number


def test_waiting_sees_what_another_thread_writes() -> None:
    """Memory is given by its address, as pinned host memory is."""
    word = torch.zeros(1, dtype=torch.int32)
    source, out = torch.zeros(64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)

    def answer() -> None:
        source.copy_(torch.arange(64))
        word[0] = 3

    timer = threading.Timer(0.05, answer)
    timer.start()
    _wait_and_copy[(1,)](word.data_ptr(), 3, source.data_ptr(), out, 64, False)
    timer.join()
    assert out.tolist() == [*range(63), 0]
