"""The interface that receives the progress of a training run."""

from __future__ import annotations


class Progress:
    """Receives the events of a run. This base class ignores them."""

    def stage(self, text: str) -> None:
        """A line about a stage before training, such as loading."""

    def begin(self, done: int, steps: int) -> None:
        """Training begins after ``done`` of ``steps`` optimizer steps."""

    def step(self, step: int, loss: float, rate: float) -> None:
        """An optimizer step ended. loss: nats per token. rate: tokens a second so far."""

    def measuring(self, done: int, blocks: int) -> None:
        """``done`` of the held-out blocks are measured."""

    def held_out(self, step: int, loss: float) -> None:
        """The held-out loss after a step, in nats per token."""

    def saved(self, step: int) -> None:
        """A complete checkpoint of a step was written."""

    def stopping(self, signal: str) -> None:
        """A signal came; the run stops after this step."""
