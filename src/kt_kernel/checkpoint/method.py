"""Selects the method for a checkpoint: `--kt-method auto`."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from ..runtime.text import ranges
from ..weights.methods import QUANTISED_TO
from .base import Checkpoint
from .stored import Stored, common_method, dense_weights


@dataclass(frozen=True)
class Choice:
    """A method, and a short reason for it."""

    method: str
    reason: str


#: For 16- and 32-bit weights.
QUANTISE = Choice(QUANTISED_TO, dense_weights().title)


def method_of(checkpoint: Checkpoint, layers: Container[int] | None = None) -> Choice:
    """The method that keeps the experts as they are stored, or `QUANTISED_TO` if all of them have
    16 or 32 bits. It is `MIXED` where no other method keeps all matrices.

    Uses only the headers that were read on opening.

    Args:
        layers: numbers of the layers to consider. None: all that have experts.

    Raises:
        ValueError: none of these layers has experts, or a layer's format is unknown.
    """
    found: dict[Stored, list[int]] = {}
    for layer in checkpoint.layers():
        if layers is None or layer in layers:
            found.setdefault(checkpoint.stored(layer), []).append(layer)
    if not found:
        raise ValueError(
            f"{checkpoint.path}: no layer of the model has experts there; layers with "
            f"experts: {ranges(checkpoint.layers(), ', ') or 'none'}"
        )
    if all(stored.dense for stored in found):
        return QUANTISE
    method = common_method(name for stored in found for name in stored.each)
    if len(found) == 1:
        return Choice(method, next(iter(found)).title)
    return Choice(method, "; ".join(map(_in_layers, found.items())))


def _in_layers(item: tuple[Stored, list[int]]) -> str:
    stored, layers = item
    return f"{stored.title} in layer{'s' if len(layers) > 1 else ''} {ranges(layers, ', ')}"
