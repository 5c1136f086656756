"""Calls of one mode's wrapper on a wrapper of the other mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn


def refuse_calls(cls: type, mode: str, calls: Mapping[str, str]) -> None:
    """Gives ``cls``, which has the other mode, methods that raise RuntimeError.

    calls: what belongs to ``mode``, and what to do instead.
    """
    for name, instead in calls.items():
        setattr(cls, name, _refuse(name, mode, instead))


def _refuse(name: str, mode: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            f"layer {self.layer_idx}: {name} belongs to mode={mode!r}, this wrapper has "
            f"mode={self.mode!r}; {instead}"
        )

    refuse.__name__ = name
    refuse.__doc__ = f"Raises RuntimeError: {instead}."
    return refuse
