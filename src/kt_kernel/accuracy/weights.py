"""Errors of packed weights, compared with their checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch

from ..checkpoint import open_checkpoint
from ..weights.expert_tensors import MATRICES
from .layers import load_layer


@dataclass(frozen=True)
class MatrixError:
    """Of all experts' gates, ups or downs: ‖packed - source‖ / ‖source‖ of all together, and of the
    worst row, which is that of `expert` and `row`. Rows of zeros count as 0."""

    relative: float
    worst: float
    expert: int
    row: int


@dataclass(frozen=True)
class LayerErrors:
    layer: int
    gate: MatrixError
    up: MatrixError
    down: MatrixError


def weight_report(
    source: str | os.PathLike[str],
    packed: str | os.PathLike[str],
    method: str,
    *,
    layers: Iterable[int] | None = None,
    threads: int | None = None,
    scale_search: bool = False,
    progress: Callable[[LayerErrors], None] | None = None,
) -> list[LayerErrors]:
    """Compares the weights that the kernels would use with those of a checkpoint, layer by layer.

    source: a checkpoint; of a quantised one, the values that its codes stand for. packed: what
    `kt quant` made of it; or any other path that ``method`` takes, such as `source` itself, which
    is then quantised here. layers: default all. progress: called after each layer.

    One layer is in memory at a time. Raises what the readers raise, and ValueError for a layer
    whose sizes differ.
    """
    original = open_checkpoint(source)
    found = []
    for number in original.layers() if layers is None else layers:
        sizes, others = original.sizes(number), open_checkpoint(packed).sizes(number)
        if sizes != others:
            raise ValueError(
                f"{packed}: layer {number} has experts, hidden size and intermediate size of"
                f" {others}, but {source} has {sizes}; expected the same model"
            )
        layer = load_layer(
            packed, number, method, threads=threads, scale_search=scale_search, to_run=False
        )
        with original.each_expert(number, *sizes, method="BF16") as experts:
            sums = {name: _Sums() for name in MATRICES}
            for expert, tensors in experts:
                for name in MATRICES:
                    dense = tensors[name]
                    assert isinstance(dense, torch.Tensor)  # as BF16 takes them
                    weights = dense.float()
                    sums[name].add(expert, weights, layer.unpacked(expert, name))
        errors = LayerErrors(number, *(sums[name].result() for name in MATRICES))
        found.append(errors)
        if progress is not None:
            progress(errors)
    return found


class _Sums:
    """Squares summed over experts."""

    def __init__(self) -> None:
        self._error = self._size = 0.0
        self._worst, self._place = 0.0, (0, 0)

    def add(self, expert: int, source: torch.Tensor, packed: torch.Tensor) -> None:
        size = source.square().sum(1, dtype=torch.float64)
        error = (packed - source).square().sum(1, dtype=torch.float64)
        self._size += float(size.sum())
        self._error += float(error.sum())
        ratio = torch.where(size == 0, error, error / size)
        row = int(ratio.argmax())
        if ratio[row] > self._worst:
            self._worst, self._place = float(ratio[row]), (expert, row)

    def result(self) -> MatrixError:
        relative = (self._error / self._size) ** 0.5 if self._size else self._error**0.5
        return MatrixError(relative, self._worst**0.5, *self._place)


def table(errors: Iterable[LayerErrors]) -> str:
    """As lines of a Markdown table, the mean over the layers last."""
    rows = list(errors)
    lines = ["| layer | gate | up | down | worst row |", "|---|---|---|---|---|"]
    for row in rows:
        named = [(getattr(row, name), name) for name in MATRICES]
        worst, name = max(named, key=lambda each: each[0].worst)
        place = f"{name} of expert {worst.expert}, row {worst.row}: {worst.worst:.3%}"
        numbers = " | ".join(f"{error.relative:.3%}" for error, _ in named)
        lines.append(f"| {row.layer} | {numbers} | {place} |")
    if len(rows) > 1:
        means = (
            sum(getattr(row, name).relative ** 2 for row in rows) / len(rows) for name in MATRICES
        )
        lines.append(f"| all | {' | '.join(f'{mean**0.5:.3%}' for mean in means)} | |")
    return "\n".join(lines)


def to_json(errors: Iterable[LayerErrors]) -> str:
    """The same as a JSON list of objects."""
    return json.dumps([asdict(row) for row in errors], indent=1)
