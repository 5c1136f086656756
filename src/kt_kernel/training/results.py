"""The results of a run: metrics as JSON, and a plot of the losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..runtime.figures import png_of
from ..runtime.files import replace_file

#: (number of optimizer steps done, value).
Curve = list[tuple[int, float]]


@dataclass(frozen=True)
class Metrics:
    """Losses in nats per token.

    Attributes:
        steps: optimizer steps of the run.
        train: loss of each step.
        held_out: the held-out loss where it was measured, first at step 0.
        train_tokens, held_out_tokens: tokens in blocks.
        tokens_per_second, seconds: of the training steps since the start or the last resumption.
    """

    steps: int
    train: Curve
    held_out: Curve
    train_tokens: int
    held_out_tokens: int
    seconds: float
    tokens_per_second: float

    @property
    def before(self) -> float:
        return self.held_out[0][1]

    @property
    def after(self) -> float:
        return self.held_out[-1][1]

    def to_json(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The content of metrics.json. A perplexity that is beyond float64 is null there."""
        values = {"before": self.before, "after": self.after}
        found = {name: perplexity(loss) for name, loss in values.items()}
        return asdict(self) | {
            "held_out_loss": values,
            "held_out_perplexity": {n: v if math.isfinite(v) else None for n, v in found.items()},
            "settings": settings,
        }


def perplexity(loss: float) -> float:
    """exp(loss); infinite where that is beyond float64, as after a training that diverged."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def curves(history: Sequence[Mapping[str, Any]]) -> tuple[Curve, Curve]:
    """Training and held-out losses in the ``log_history`` of a TrainerState."""
    train = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    held_out = {e["step"]: e["eval_loss"] for e in history if "eval_loss" in e}
    return train, sorted(held_out.items())


def plot(metrics: Metrics, path: str, title: str) -> None:
    """Draws both curves to a PNG file. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = [step for step, _ in metrics.train]
    losses = [loss for _, loss in metrics.train]
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training, each step")
    window = max(1, len(losses) // 20)
    if window > 1:
        means = [math.fsum(losses[i - window : i]) / window for i in range(window, len(losses) + 1)]
        axes.plot(
            steps[window - 1 :], means, color="tab:blue", label=f"training, mean of {window} steps"
        )
    axes.plot(*zip(*metrics.held_out, strict=True), "o-", color="tab:orange", label="held out")
    for step, loss in (metrics.held_out[0], metrics.held_out[-1]):
        axes.annotate(
            f"{loss:.3f}", (step, loss), xytext=(0, 8), textcoords="offset points", ha="center"
        )
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token", title=title)
    axes.margins(0.08)
    axes.grid(alpha=0.3)
    axes.legend()
    replace_file(path, png_of(figure, dpi=120))
