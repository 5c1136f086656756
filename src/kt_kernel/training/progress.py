"""What a run tells of its progress."""

from __future__ import annotations


class Progress:
    """Is told what happens; does nothing."""

    def stage(self, text: str) -> None:
        """Work before the training has begun, or a result of it."""

    def begin(self, done: int, steps: int) -> None:
        """Training begins after ``done`` of ``steps`` optimizer steps."""

    def step(self, step: int, loss: float, rate: float) -> None:
        """An optimizer step ended. loss: nats per token. rate: tokens a second so far."""

    def measuring(self, done: int, blocks: int) -> None:
        """So many of the held-out blocks are measured."""

    def held_out(self, step: int, loss: float) -> None:
        """The held-out loss after a step, in nats per token."""

    def saved(self, step: int) -> None:
        """There is a whole checkpoint of a step."""

    def stopping(self, signal: str) -> None:
        """A signal came; the run stops after this step."""
