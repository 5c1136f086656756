"""The progress and the result of ``kt sft train``."""

from __future__ import annotations

import math
import sys
import time

from rich.progress import TaskID

from ..training.progress import Progress
from ..training.results import perplexity
from ..training.run import Result
from .progress import steps_bar

TELL_SECONDS = 30.0  # between log lines, if there is no terminal for a bar


class Shown(Progress):
    """A bar for the steps and one for each measurement. Without a terminal, a line now and then."""

    last_saved: int | None = None

    def __enter__(self) -> Shown:
        self._bar = steps_bar()
        self._measure: TaskID | None = None
        self._held_out = ""
        self._told = -math.inf
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def _say(self, text: str) -> None:
        if self._bar.disable:
            print(f"kt: {text}", file=sys.stderr, flush=True)
        else:
            self._bar.console.print(f"kt: {text}", highlight=False, markup=False)

    def stage(self, text: str) -> None:
        self._say(text)

    def begin(self, done: int, steps: int) -> None:
        self._steps, self._first = steps, done
        self._began = time.monotonic()
        self.last_saved = done or None
        self._task = self._bar.add_task("training", total=steps, completed=done)
        if done:
            self._say(f"resuming after step {done} of {steps}")

    def step(self, step: int, loss: float, rate: float) -> None:
        text = f"loss {loss:.3f}{self._held_out}, {rate:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, description=text)
        now = time.monotonic()
        if self._bar.disable and now - self._told >= TELL_SECONDS:
            self._told = now
            left = (now - self._began) / (step - self._first) * (self._steps - step) / 60
            self._say(f"step {step} of {self._steps}: {text}, {left:.0f} min left")

    def measuring(self, done: int, blocks: int) -> None:
        if self._measure is None:
            self._measure = self._bar.add_task("measuring the held-out loss", total=blocks)
        self._bar.update(self._measure, completed=done)
        if done == blocks:
            self._bar.remove_task(self._measure)
            self._measure = None

    def held_out(self, step: int, loss: float) -> None:
        self._held_out = f", held out {loss:.3f}"
        self._say(f"held-out loss after step {step}: {loss:.4f}")

    def saved(self, step: int) -> None:
        self.last_saved = step

    def stopping(self, signal: str) -> None:
        self._say(f"{signal}: finishing this step and saving a checkpoint; again to stop at once")


def summary(result: Result) -> str:
    """The lines that a finished run prints."""
    metrics = result.metrics
    lines = [
        f"held-out loss {metrics.before:.4f} -> {metrics.after:.4f} nats per token, perplexity"
        f" {perplexity(metrics.before):.3f} -> {perplexity(metrics.after):.3f},"
        f" in {metrics.steps} steps",
        f"adapter: {result.adapter}",
        f"metrics: {result.metrics_file}",
    ]
    if result.plot is not None:
        lines.append(f"plot: {result.plot}")
    return "\n".join(f"kt: {line}" for line in lines)
