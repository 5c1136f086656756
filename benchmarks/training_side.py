"""Trains one layer of routine "sft" in a process of its own; training.py starts it.

    training_side.py REQUEST FD      see helper.py; REQUEST: JSON, see `Request`

Requests on the standard input: {"tokens": T, "seconds": s} is answered with the times of
{"forward": [...], "backward": [...], "step": [...]}; {"memory": T} with {"peak": bytes}: what the
process has held at most in training steps, beyond what it held before the layer was made;
{"output": T, "path": p} by writing y, the gradients of x and of the router weights, and those of
LoRA to p.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helper import first_line, serve
from peer import Refused
from shapes import Shape
from training_layers import Batch, Ours, Torch, Trained


@dataclass
class Request:
    package: str
    method: str
    shape: list[Any]
    rank: int
    threads: int | None  # None: as many as kt_kernel takes by default
    torch_threads: int
    max_tokens: int
    folder: str | None  # of kt-kernel's unpacked wheel


def make_layer(request: Request, shape: Shape) -> Trained:
    if request.package == "kt_moe":
        return Ours(shape, request.rank, request.method, request.threads)
    if request.package == "peft":
        return Torch(shape, request.rank, request.method)
    from training_peer import Peer

    assert request.folder is not None
    return Peer(
        shape,
        request.rank,
        request.method,
        request.threads,
        request.folder,
        request.max_tokens,
    )


PACKAGES = {"kt_moe": ("kt_kernel.sft", "peft"), "peft": ("peft", "transformers")}


class Bench:
    def __init__(self, request: Request) -> None:
        self._shape = Shape(*request.shape)
        for name in PACKAGES.get(request.package, ()):
            importlib.import_module(name)
        self._before = _resident("VmRSS")
        self._layer = make_layer(request, self._shape)
        self._batches: dict[int, Batch] = {}

    def batch(self, tokens: int) -> Batch:
        if tokens not in self._batches:
            self._batches[tokens] = Batch.make(self._shape, tokens)
        return self._batches[tokens]

    def visit(self, tokens: int, seconds: float) -> dict[str, list[float]]:
        """The first step of a visit brings threads and memory back and does not count, unless steps
        are so long that it makes no difference."""
        batch = self.batch(tokens)
        end = time.perf_counter() + seconds
        found = [self._step(batch)]
        if found[0][2] < 0.5:
            found = [self._step(batch)]
        while time.perf_counter() < end:
            found.append(self._step(batch))
        return {
            name: [times[i] for times in found]
            for i, name in enumerate(("forward", "backward", "step"))
        }

    def memory(self, tokens: int) -> int:
        batch = self.batch(tokens)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
        for _ in range(2):  # the optimizer's state is there from the first step on
            self._step(batch)
        return _resident("VmHWM") - self._before

    def output(self, tokens: int) -> list[torch.Tensor]:
        batch = self.batch(tokens)
        x, weights = self._leaves(batch)
        y = self._layer.forward(x, batch.ids, weights)
        self._layer.backward(y, batch.grad)
        return [t.float() for t in (y.detach(), x.grad, weights.grad)] + [
            gradient.float() for gradient in self._layer.lora_gradients()
        ]

    @staticmethod
    def _leaves(batch: Batch) -> list[torch.Tensor]:
        return [t.detach().requires_grad_() for t in (batch.x, batch.weights)]

    def _step(self, batch: Batch) -> tuple[float, float, float]:
        x, weights = self._leaves(batch)
        times = [time.perf_counter()]
        y = self._layer.forward(x, batch.ids, weights)
        times.append(time.perf_counter())
        self._layer.backward(y, batch.grad)
        times.append(time.perf_counter())
        self._layer.update()
        times.append(time.perf_counter())
        return times[1] - times[0], times[2] - times[1], times[3] - times[0]


def _resident(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {name}")


def start(given: dict[str, Any]) -> tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]:
    request = Request(**given)
    torch.set_num_threads(request.torch_threads)
    bench = Bench(request)

    def answer(asked: dict[str, Any]) -> dict[str, Any]:
        if "output" in asked:
            torch.save(bench.output(asked["output"]), asked["path"])
            return {"done": True}
        if "memory" in asked:
            return {"peak": bench.memory(asked["memory"])}
        return bench.visit(asked["tokens"], asked["seconds"])

    return request.method, answer


if __name__ == "__main__":
    serve(
        start,
        (Refused, ImportError, RuntimeError, ValueError, NotImplementedError),
        lambda error: f"{type(error).__name__}: {first_line(error)}",
    )
