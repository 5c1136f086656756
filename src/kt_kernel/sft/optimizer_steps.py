"""Whether tensors have changed, by optimizer steps among others.

The versions of tensors do not tell of all of them: fused optimizers, `Trainer`'s default among
them, change parameters without counting, and a tensor and its ``.data`` count apart. Every
optimizer of torch runs the hooks for steps, though.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

_steps = itertools.count(1)
_last_step: dict[int, int] = {}  # by address of the memory: the number of the last step on it


def last_step(tensors: Iterable[torch.Tensor]) -> int:
    """The number of the last step that an optimizer made on one of the tensors; 0 for none."""
    return max((_last_step.get(tensor.data_ptr(), 0) for tensor in tensors), default=0)


def state_of(tensors: Collection[torch.Tensor]) -> tuple[Any, ...]:
    """What differs after changes in place and after optimizer steps. Other changes through
    ``.data`` are not seen."""
    # Tensors of inference mode have no version.
    versions = [None if tensor.is_inference() else tensor._version for tensor in tensors]
    return last_step(tensors), tuple(tensor.data_ptr() for tensor in tensors), tuple(versions)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    changed = (
        parameter.data_ptr()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if type(parameter) in (torch.Tensor, torch.nn.Parameter)  # others have no memory of theirs
    )
    _last_step.update(dict.fromkeys(changed, next(_steps)))


register_optimizer_step_post_hook(_after_step)
