"""Locks that a forked child finds open, whatever another thread of the parent was doing."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

_owners: weakref.WeakKeyDictionary[Any, tuple[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()


def give_lock(owner: Any, attribute: str, make: Callable[[], Any]) -> None:
    """Sets ``owner.attribute`` to a new lock, and to another one in every forked child."""
    setattr(owner, attribute, make())
    _owners[owner] = (attribute, make)


def _renew_after_fork() -> None:
    for owner, (attribute, make) in list(_owners.items()):
        setattr(owner, attribute, make())


os.register_at_fork(after_in_child=_renew_after_fork)
