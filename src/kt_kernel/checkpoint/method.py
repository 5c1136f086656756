"""Selects the method for a checkpoint: `--kt-method auto`."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from ..runtime.text import ranges
from ..weights.methods import METHODS, QUANTISED_TO
from .base import Checkpoint
from .stored import Stored, dense_weights


@dataclass(frozen=True)
class Choice:
    """A method, and a short reason for it."""

    method: str
    reason: str


#: For 16- and 32-bit weights.
QUANTISE = Choice(QUANTISED_TO, dense_weights().title)


def method_of(checkpoint: Checkpoint, layers: Container[int] | None = None) -> Choice:
    """The method that keeps the experts as they are stored, or `QUANTISED_TO` for 16 and 32 bits.

    Uses only the headers that were read on opening.

    Args:
        layers: numbers of the layers to consider. None: all that have experts.

    Raises:
        ValueError: none of these layers has experts, a layer's format is unknown, or the layers
            differ. The message has the formats found and the methods that read them all.
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
    methods = {stored.method for stored in found}
    if len(methods) > 1:
        raise ValueError(f"{checkpoint.path}: {_differ(found)}")
    titles = (stored.title for stored in found if not stored.dense)
    return Choice(methods.pop(), " and ".join(dict.fromkeys(titles)))


def _differ(found: dict[Stored, list[int]]) -> str:
    what = "; ".join(
        f"layer{'s' if len(layers) > 1 else ''} {ranges(layers, ', ')}: {stored.title}"
        for stored, layers in found.items()
    )
    methods = [
        method.name
        for method in METHODS.values()
        if all(stored.taken_by(method) for stored in found)
    ]
    advice = (
        f"choose a method that reads all of them: {', '.join(methods)}"
        if methods
        else "no method reads all of them; use a checkpoint in one format"
    )
    return f"the layers have different formats ({what}), so auto cannot choose a method; {advice}"
