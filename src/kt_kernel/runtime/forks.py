"""State that a forked child must recreate, because it does not have its parent's threads."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

_renewed: weakref.WeakKeyDictionary[Any, dict[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()


def per_process(owner: Any, attribute: str, make: Callable[[], Any]) -> None:
    """Sets ``owner.attribute`` to ``make()``, now and again in every forked child.

    For locks, which another thread of the parent may hold at the fork, and for state of work that
    only the parent completes.
    """
    setattr(owner, attribute, make())
    _renewed.setdefault(owner, {})[attribute] = make


def _after_fork() -> None:
    for owner, attributes in list(_renewed.items()):
        for attribute, make in attributes.items():
            setattr(owner, attribute, make())


os.register_at_fork(after_in_child=_after_fork)
