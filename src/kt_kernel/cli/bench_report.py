"""The output of ``kt bench trace``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict

from ..trace.summary import LayerTimes, ModelTimes, Summary


def text(summary: Summary) -> str:
    """A Markdown table of the layers of each model, and its totals."""
    return "\n\n".join(
        "\n".join([_title(model), "", *_table(model.layers), "", *_totals(model)])
        for model in summary.models
    )


def to_json(summary: Summary) -> str:
    """The same as a JSON object with the list "models"."""
    return json.dumps(asdict(summary), indent=1)


def _title(model: ModelTimes) -> str:
    others = ", ".join(
        f"{passes} of {_count(tokens, 'token')}"
        for tokens, passes in model.counts.items()
        if tokens != model.tokens
    )
    return (
        f"{model.device}, model {model.chain}: microseconds per pass, mean of "
        f"{_count(model.passes, 'pass', 'es')} of {_count(model.tokens, 'token')}"
        + (f" (also in this trace: {others})" if others else "")
    )


def _table(rows: Iterable[LayerTimes]) -> list[str]:
    lines = ["| layer | passes | CPU | GPU | transfers | exposed |", "|---|---|---|---|---|---|"]
    for row in rows:
        times = " | ".join(f"{t:.1f}" for t in (row.cpu, row.gpu, row.transfers, row.exposed))
        lines.append(f"| {row.layer} | {row.passes} | {times} |")
    return lines


def _totals(model: ModelTimes) -> list[str]:
    """The totals, with the names and formulas of `ModelTimes`."""
    lines = [
        f"t_cpu {model.t_cpu:.1f}, t_gpu (with transfers) {model.t_gpu:.1f}, exposed "
        f"{model.exposed:.1f}, elapsed {model.elapsed:.1f}"
    ]
    if model.bound is not None and model.reached is not None and model.share is not None:
        lines.append(
            f"speedup over no overlap: at most {model.bound:.2f}, reached {model.reached:.2f} "
            f"({model.share:.0%})"
        )
    return lines


def _count(number: int, what: str, plural: str = "s") -> str:
    return f"{number} {what}{plural if number != 1 else ''}"
