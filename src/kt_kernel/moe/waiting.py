"""The started batches of a layer whose results were not asked for yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..runtime.forks import per_process
from . import buffers
from .batch_checks import BatchChecks, Like

_MOST = 4  # batches of one layer


class StartedBatch(Protocol):
    """A CpuBatch, or a Batch of device.layer."""

    def collect(self, cuda_stream: Any) -> torch.Tensor: ...

    def collect_and_add(
        self, hot: torch.Tensor | None, cuda_stream: Any, scale: float
    ) -> torch.Tensor: ...


@dataclass(slots=True, eq=False)
class _Entry:
    address: int  # of the hidden states
    like: Like
    batch: StartedBatch


class Waiting:
    """Finds a batch by the hidden states that it was started with.

    The oldest one is dropped after ``_MOST`` more, so a pass that ended in an error needs no
    clean-up. A forked child starts without any.
    """

    def __init__(self, checks: BatchChecks) -> None:
        self._checks = checks
        self._entries: list[_Entry]  # oldest first
        per_process(self, "_entries", list)
        self._dropped: bool  # whether any was
        per_process(self, "_dropped", bool)

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, address: int, like: Like, batch: StartedBatch) -> None:
        """Remembers a batch; one with the same hidden states before it is forgotten."""
        if self._entries:
            others = [e for e in self._entries if e.address != address or e.like != like]
            self._dropped |= len(others) >= _MOST
            self._entries = others[1 - _MOST :]
        self._entries.append(_Entry(address, like, batch))

    def take(self, hidden_states: torch.Tensor | None) -> StartedBatch:
        """Removes and returns the latest batch with these hidden states; None: the latest of all.

        A copy of the hidden states will do while exactly one batch waits and none was dropped.

        Raises:
            RuntimeError: no batch waits.
            TypeError: not a tensor.
            ValueError: no waiting batch has these hidden states.
        """
        entries, checks = self._entries, self._checks
        if not entries:
            lost = "; what was submitted before the process forked is lost in the child"
            raise RuntimeError(
                f"{checks.where}: sync_forward without submit_forward"
                + (lost if buffers.generation() else "")
            )
        entry = entries[-1]
        if hidden_states is not None:
            like, address = checks.hidden(hidden_states), hidden_states.data_ptr()
            for entry in reversed(entries):
                if entry.address == address and entry.like == like:
                    break
            else:
                entry = self._of_a_copy(hidden_states, like)
        entries.remove(entry)
        return entry.batch

    def _of_a_copy(self, hidden_states: torch.Tensor, like: Like) -> _Entry:
        where, entries = self._checks.where, self._entries
        alike = any(entry.like == like for entry in entries)
        if alike and len(entries) == 1 and not self._dropped:
            return entries[0]
        if alike:
            raise ValueError(
                f"{where}: hidden_states is not one of the {len(entries)} tensors whose "
                f"results wait (a result is dropped after {_MOST} more submits); pass the "
                "tensor that was given to submit_forward, or None for the latest"
            )
        tokens, dtype, device = entries[-1].like
        raise ValueError(
            f"{where}: the pending result is [{tokens}, {self._checks.hidden_size}] {dtype} on "
            f"{device}; hidden_states is {list(hidden_states.shape)} {like.dtype} on {like.device}"
        )
