"""A process that forks while its threads submit: the child computes on, with threads of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, threading
import numpy as np
from tests.kernels.core import INT8_ROW, Layer
from tests.kernels.forks import join_child

layers = [Layer(("_C", "avx2"), INT8_ROW, 0, threads=(2,), seed=s) for s in range(3)]
batches = [layer.batch(5) for layer in layers]
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
        same = np.array_equal(layers[turn % 3].forward(*batches[turn % 3]), expected[turn % 3])
        fresh = Layer(("_C", "avx2"), INT8_ROW, 0, threads=(2,), hidden=96 + 32 * turn)
        fresh.forward(*fresh.batch(3))
        os._exit(0 if same else 3)
    join_child(child, turn, 30)
stop.set()
for thread in threads:
    thread.join()
print("fine")
"""


def test_children_of_a_busy_process_compute() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0 and "fine" in done.stdout, done.stdout + done.stderr
