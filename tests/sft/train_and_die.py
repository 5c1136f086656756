"""Runs `train` in child processes, each of which is killed at another place.

python -m tests.sft.train_and_die SETTINGS...   as KILLED_AT, one file of settings each

One interpreter forks all children before anything runs in it: importing torch takes longest.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import transformers  # noqa: F401

from kt_kernel.training import loop, run
from kt_kernel.training.progress import Progress
from kt_kernel.training.settings import read_settings

#: Between steps 4 and 5; after the first of the two forward and backward passes of step 5; while
#: checkpoint 6 is written: the parameters are there, the optimizer's state is not.
KILLED_AT = ("between", "inside", "saving")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Dies(Progress):
    def step(self, step: int, loss: float, rate: float) -> None:
        if step == 4:
            die()


def train(path: str, place: str) -> None:
    step, save, calls = loop.LoraTrainer.training_step, torch.save, 0

    def counted(*arguments: Any, **named: Any) -> torch.Tensor:
        nonlocal calls
        result = step(*arguments, **named)
        calls += 1
        if calls == 9:
            die()
        return result

    def torn(content: Any, file: Any) -> None:
        if "checkpoint-6" in str(file):
            die()
        save(content, file)

    if place == "inside":
        loop.LoraTrainer.training_step = counted
    if place == "saving":
        torch.save = torn
    run.train(read_settings(path), progress=Dies() if place == "between" else None)


def main() -> None:
    for path, place in zip(sys.argv[1:], KILLED_AT, strict=True):
        child = os.fork()
        if child == 0:
            train(path, place)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, (place, status)


if __name__ == "__main__":
    main()
