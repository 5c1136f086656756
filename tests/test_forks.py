"""A process that forks while its other threads are busy: what the child does not take over."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from kernels.forks import run_program

from kt_kernel.runtime.machine_cache import _lock_on
from kt_kernel.trace.writer import TraceWriter
from kt_kernel.weights.store.lock import only_writer

PASSES = """
import os, sys, threading, time
import torch
from kt_kernel import KTMoEWrapper
from tests.kernels.forks import join_child

torch.set_num_threads(1)  # its own threads do not exist in a child, and it would wait for them
torch.manual_seed(0)
E, K, H, I = 64, 8, 1024, 32
weights = [torch.randn(E, *shape) / 16 for shape in ((I, H), (I, H), (H, I))]

def make(layer_idx, deferred=0):
    wrapper = KTMoEWrapper(
        layer_idx, E, K, H, I, num_gpu_experts=0, cpuinfer_threads=2, method="BF16",
        max_deferred_experts_per_token=deferred,
    )
    wrapper.load_weights_from_tensors(*weights, torch.arange(E))
    return wrapper

def batch(tokens):
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(tokens)])
    return torch.randn(tokens, H), ids, torch.rand(tokens, K)

def forward(tokens):  # through both layers, the first of which defers
    return first.forward(*batches[tokens]), second.forward(*batches[tokens])

first, second = make(0, deferred=2), make(1)
batches = {tokens: batch(tokens) for tokens in (1, 40, 512)}
expected = {tokens: forward(tokens) for tokens in batches}
stop = threading.Event()

def compute():
    while not stop.is_set():
        forward(512)

thread = threading.Thread(target=compute)
thread.start()
for turn in range(20):
    time.sleep(0.001 * (turn % 7))
    child = os.fork()
    if child == 0:
        for tokens in (512, 1, 40):
            if not all(map(torch.equal, forward(tokens), expected[tokens])):
                os._exit(1)
        if turn % 4:
            os._exit(0)
        sys.exit(0)  # the interpreter and its libraries end, too
    join_child(child, turn, 60)
stop.set()
thread.join()
print("fine")
"""


def test_children_forked_during_a_pass_compute_the_same_bits() -> None:
    run_program(PASSES)


WAITING = """
import os, torch
from kt_kernel import KTMoEWrapper
from tests.kernels.forks import join_child

wrapper = KTMoEWrapper(0, 4, 2, 64, 32, num_gpu_experts=0, cpuinfer_threads=1, method="BF16")
wrapper.load_weights_from_tensors(
    torch.randn(4, 32, 64), torch.randn(4, 32, 64), torch.randn(4, 64, 32), torch.arange(4)
)
x, ids, weights = torch.randn(3, 64), torch.randint(4, (3, 2)), torch.rand(3, 2)
expected = wrapper.forward(x, ids, weights)
for _ in range(3):
    wrapper.submit_forward(torch.randn(3, 64), ids, weights)
child = os.fork()
if child == 0:
    wrapper.submit_forward(x, ids, weights)
    # A copy is as good as the tensor itself while one result waits, and none was dropped.
    os._exit(not torch.equal(wrapper.sync_forward(x.clone()), expected))
join_child(child, 0, 60)
print("fine")
"""


def test_results_that_wait_in_the_parent_do_not_wait_in_the_child() -> None:
    run_program(WAITING)


def in_child(work: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = not work()
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def open_locks() -> list[str]:
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # of the listing itself
            continue
        if path.endswith("lock"):
            found.append(path)
    return found


@pytest.mark.parametrize(
    "hold",
    [
        _lock_on,
        lambda folder: only_writer(str(folder), wait=False),
    ],
    ids=["measurements", "packed directory"],
)
def test_a_child_does_not_hold_its_parents_locks(
    tmp_path: Path, hold: Callable[[Path], AbstractContextManager[None]]
) -> None:
    """Or they would stay locked for as long as it lives."""
    with hold(tmp_path):
        assert len(open_locks()) == 1
        assert in_child(lambda: open_locks() == [])
        assert len(open_locks()) == 1
    assert open_locks() == []


def test_a_child_leaves_its_parents_trace_alone(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    writer = TraceWriter(path, "cuda:0")

    def child() -> bool:
        before = path.read_bytes()
        TraceWriter(path, "cuda:1").close()
        writer.close()
        other = tmp_path / "other.json"
        TraceWriter(other, "cuda:0").close()
        return path.read_bytes() == before and bool(json.loads(other.read_text()))

    assert in_child(child)
    writer.close()
    assert {event["args"].get("name") for event in json.loads(path.read_text())} >= {"cuda:0"}
