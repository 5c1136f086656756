"""Optimizer steps that change LoRA tensors.

The versions of tensors do not tell of all of them: fused optimizers, `Trainer`'s default among
them, change parameters without counting, and a tensor and its ``.data`` count apart. Every
optimizer of torch runs the hooks for steps, though.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class StepWatcher:
    """Tells whether an optimizer has made a step on one of some tensors, by their memory."""

    def __init__(self) -> None:
        self._memory: frozenset[int] = frozenset()
        self.stepped = False
        _watchers.add(self)

    def watch(self, *tensors: torch.Tensor) -> None:
        """From now on of these tensors, on which no step was made yet."""
        self._memory = frozenset(tensor.data_ptr() for tensor in tensors)
        self.stepped = False

    def note(self, changed: frozenset[int]) -> None:
        """A step was made on the memory at these addresses."""
        self.stepped = self.stepped or not self._memory.isdisjoint(changed)


_watchers: weakref.WeakSet[StepWatcher] = weakref.WeakSet()
_steps = itertools.count(1)
_last_step: dict[int, int] = {}  # by memory: the number of the last step on it


def last_step(*tensors: torch.Tensor) -> int:
    """The number of the last step that an optimizer made on one of the tensors; 0 for none."""
    return max(_last_step.get(tensor.data_ptr(), 0) for tensor in tensors)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    watchers = list(_watchers)
    if not watchers:
        return
    changed = frozenset(
        parameter.data_ptr()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if type(parameter) in (torch.Tensor, torch.nn.Parameter)  # others have no memory of theirs
    )
    _last_step.update(dict.fromkeys(changed, next(_steps)))
    for watcher in watchers:
        watcher.note(changed)


register_optimizer_step_post_hook(_after_step)
