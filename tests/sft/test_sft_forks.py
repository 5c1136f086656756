"""A process that forks while it trains: what the child has, and what it is told that it has not."""

from __future__ import annotations

import pytest
from kernels.forks import run_program

# A thread that trains all the time; then passes under way at the fork.
CORE = """
import os, threading
import numpy as np
from kernels.core import BF16, Layer, Variant
from kernels.forks import join_child, refused
from sft.core_oracle import Trained, values_of

def made(**training):
    return Trained(Layer(Variant("_C", "avx2"), BF16, 0, 4, 2, 256, 512), 8, options=training)

def same(a, b):
    return all(map(np.array_equal, (a.out, a.grad_in, a.grad_weights, *a.grads),
                   (b.out, b.grad_in, b.grad_weights, *b.grads)))

one = made()
batch = one.batch(40)
expected = one.run(batch)
stop = threading.Event()

def train():
    while not stop.is_set():
        one.run(batch)
        one.layer.update_lora(*one.adapters)

thread = threading.Thread(target=train)
thread.start()
codes, nothing = set(), [a[:0] for a in (batch.x, batch.ids, batch.weights, batch.x)]
for turn in range(10):
    child = os.fork()
    if child == 0:
        code = 0
        while one.layer.pending:
            try:
                one.layer.drop_newest()
            except RuntimeError as error:
                code = 10 if "lost when the process forked during a call" in str(error) else 1
        if refused(lambda: one.layer.forward(*nothing, save=False, seed=0), "call update_lora"):
            code = 11
            one.layer.update_lora(*one.adapters)
        os._exit(code if same(one.run(batch), expected) else 2)
    codes.add(join_child(child, turn, 60, accepted=(0, 10, 11)))
stop.set()
thread.join()
assert codes & {10, 11}, "no child was forked during a call"

# Passes that wait: one is done, the others are under way.
two = made(max_cache_depth=3)
first, large = two.batch(30), two.batch(3000)
expected = two.run(first)
two.forward(first)
out = np.empty_like(large.x)
tickets = [
    two.layer.submit_forward(large.x, large.ids, large.weights, out, save=True, seed=0)
    for _ in range(2)
]
child = os.fork()
if child == 0:
    backward = lambda: two.backward(large)
    code = 0 if refused(backward, "is lost in this process; call drop_newest, then forward") else 1
    two.layer.drop_newest()
    two.layer.drop_newest()
    got = two.backward(first)
    if two.layer.pending or not np.array_equal(values_of(got[0]), expected.grad_in):
        code = code or 2
    if not same(two.run(first), expected):
        code = code or 3
    os._exit(code)
join_child(child, 0, 60)
for ticket in tickets:
    ticket.wait()
two.backward(large)
print("fine")
"""

WRAPPER = """
import os, threading, time
import torch
from kernels.forks import join_child, refused
from sft.layers import Batch, lora_tensors, ready
from sft.test_autograd import leaves, make_module
from kt_kernel.sft import KExpertsSFTBuffer

torch.set_num_threads(1)  # its own threads do not exist in a child, and it would wait for them
small, large = Batch(5), Batch(4000)

def step(wrapper, batch=small):
    return wrapper.forward_sft(*batch.forward), *wrapper.backward(batch.grad)

def same(a, b):
    return torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) and torch.equal(a[3], b[3]) and all(
        torch.equal(a[2][name], b[2][name]) for name in a[2])

# Submitted and not synced. The pass below is there.
wrapper = ready(max_cache_depth=2)
expected = step(wrapper)
wrapper.forward_sft(*small.forward)
wrapper.submit_forward_sft(*large.forward)
child = os.fork()
if child == 0:
    code = 0 if refused(lambda: wrapper.backward(large.grad), "call sync_forward_sft") else 1
    code = code or (0 if refused(wrapper.sync_forward_sft, "forked and is lost") else 2)
    again = wrapper.backward(small.grad)
    if wrapper.pending or not torch.equal(again[0], expected[1]):
        code = code or 3
    os._exit(code if same(step(wrapper), expected) else 4)
join_child(child, 0, 60)
wrapper.sync_forward_sft()
wrapper.clear_pending()

# Another thread is in calls all the time. What waited is lost, or whole.
module = make_module(max_cache_depth=2)
x, ids, scores = leaves(small)
module(x, ids, scores).backward(small.grad)
wanted = x.grad.clone()
stop = threading.Event()

def train():
    while not stop.is_set():
        step(wrapper)
        wrapper.update_lora_weights()
        with torch.no_grad():
            module(*small.forward)

thread = threading.Thread(target=train)
thread.start()
for turn in range(10):
    time.sleep(0.001 * (turn % 5))
    child = os.fork()
    if child == 0:
        code = 0
        try:
            step(wrapper)
        except RuntimeError as error:
            if "call update_lora_weights" not in str(error):
                os._exit(5)
            wrapper.update_lora_weights()
        if not same(step(wrapper), expected):
            code = 6
        wrapper.clear_pending()
        x.grad = None
        y = module(x, ids, scores)
        y.backward(small.grad)
        if not torch.equal(x.grad, wanted) or wrapper.pending or module.wrapper.pending:
            code = code or 7
        os._exit(code)
    join_child(child, turn, 60)
stop.set()
thread.join()

# A graph from before the fork.
x.grad = None
y = module(x, ids, scores)
child = os.fork()
if child == 0:
    y.backward(small.grad)
    os._exit(0 if torch.equal(x.grad, wanted) else 8)
join_child(child, 0, 60)
print("fine")
"""


@pytest.mark.parametrize("program", [CORE, WRAPPER], ids=["core", "wrapper"])
def test_children_of_a_process_that_trains(program: str) -> None:
    run_program(program)
