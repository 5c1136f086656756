"""A process that forks while its threads submit: the child computes on, with threads of its own."""

from __future__ import annotations

import pytest

from .forks import run_program

# Threads that submit to one team: the queue's lock is now and then held at the fork, and a pass is
# almost always under way.
SUBMITTING = """
import os, threading
import numpy as np
from tests.kernels.core import INT8_ROW, Layer
from tests.kernels.forks import join_child

layers = [Layer(("_C", "avx2"), INT8_ROW, 0, threads=(2,), seed=s) for s in range(3)]
batches = [layer.batch(tokens) for layer, tokens in zip(layers, (5, 100, 1))]
expected = [layer.forward(*batch) for layer, batch in zip(layers, batches)]
stop = threading.Event()

def submit(i):
    while not stop.is_set():
        layers[i].forward(*batches[i])

threads = [threading.Thread(target=submit, args=(i,)) for i in range(3)]
for thread in threads:
    thread.start()
for turn in range(40):
    child = os.fork()
    if child == 0:
        for i in (turn % 3, 0, 1, 2):
            if not np.array_equal(layers[i].forward(*batches[i]), expected[i]):
                os._exit(3)
        fresh = Layer(("_C", "avx2"), INT8_ROW, 0, threads=(2,), hidden=96 + 32 * turn)
        fresh.forward(*fresh.batch(3))
        os._exit(0)
    join_child(child, turn, 30)
stop.set()
for thread in threads:
    thread.join()
print("fine")
"""

# A thread that loads a slot again and again, with a bias and without: the child has parts of both,
# and gets the right weights by loading them once more.
LOADING = """
import os, threading
import numpy as np
from tests.kernels.core import INT8_ROW, Layer, module
from tests.kernels.forks import join_child

layer = Layer(("_C", "avx2"), INT8_ROW, 0, threads=(2,), biases=True, hidden=256, inter=512)
batch = layer.batch(9)
expected = layer.forward(*batch)
plain = Layer(("_C", "avx2"), INT8_ROW, 0, threads=(2,), hidden=256, inter=512)
core, sides = module("_C"), {}
stop = threading.Event()

def load():
    while not stop.is_set():
        for one in (layer, plain):
            weights = [(w[1].ctypes.data, 0, 0, 1.0) for w in plain.weights]
            one.layer.load(1, *weights, dtypes=[2] * 3)
            one.load(1)

thread = threading.Thread(target=load)
thread.start()
unloaded = 0
for turn in range(40):
    child = os.fork()
    if child == 0:
        engine = core.StreamEngine(8, 10.0)
        side = core.StreamSide(4, 256, 2, 2, False)
        code = 0
        try:
            engine.add_slot(layer.layer, "layer", side, 0, 0, 2)
        except ValueError as error:
            code = 10 if "slot 1 is not loaded" in str(error) else 1
        layer.load(1)
        engine.add_slot(layer.layer, "layer", side, 0, 0, 2)
        os._exit(code if np.array_equal(layer.forward(*batch), expected) else 2)
    unloaded += join_child(child, turn, 30, accepted=(0, 10)) == 10
stop.set()
thread.join()
print("fine", unloaded, "children without a slot")
assert unloaded
"""

# What a child cannot have: it says so, rather than wait for ever or read memory that is not there.
LOST = """
import gc, os
import numpy as np
from tests.kernels.core import INT8_ROW, Layer, module
from tests.kernels.forks import join_child

other = Layer(("_C", "avx2"), INT8_ROW, 0, threads=(1,))
layer = Layer(("_C", "avx2"), INT8_ROW, 0, 8, threads=(1,), hidden=512, inter=2048)  # 25 MB
x, ids, weights = layer.batch(500)
y = np.zeros_like(x)
tickets = [
    layer.layer.submit(x.ctypes.data, 2, len(x), ids.ctypes.data, weights.ctypes.data,
                       y.ctypes.data)
    for _ in range(6)
]
core = module("_C")
buffer, side = core.HostBuffer(100), core.StreamSide(4, 512, 2, 2, False)
engine = core.StreamEngine(8, 10.0)

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

child = os.fork()
if child == 0:
    code = 0
    for use, error, text in (
        (lambda: tickets[-1].wait(), RuntimeError, "before the process forked"),
        (lambda: buffer.address, RuntimeError, "parent process"),
        (lambda: side.x_address, RuntimeError, "parent process"),
        (lambda: engine.ring_address, RuntimeError, "parent process"),
        (lambda: core.StreamEngine(8, 1.0).add_slot(layer.layer, "here", side, 0, 0, 2),
         ValueError, "here: the side belongs to the parent process"),
    ):
        try:
            use()
            code = 2
        except error as raised:
            code = code or (0 if text in str(raised) else 3)
    if tickets[-1].done or (buffer.nbytes, side.capacity) != (100, 4):
        code = 4
    other.forward(*other.batch(1))  # the team lets go of the parent's jobs
    before = resident()
    layer.layer = None
    tickets.clear()
    gc.collect()
    if before - resident() < 20e6:
        code = 5
    os._exit(code)
join_child(child, 0, 60)
for ticket in tickets:
    ticket.wait()
print("fine")
"""


@pytest.mark.parametrize("program", [SUBMITTING, LOADING, LOST], ids=["submit", "load", "lost"])
def test_children_of_a_busy_process(program: str) -> None:
    run_program(program)
