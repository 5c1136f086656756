"""Checks of a batch's tensors. A batch of the same kind as the last one is not checked again."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch

from ..runtime.tensors import DTYPE_NAMES, DTYPES, is_integer, need_dense, need_tensor

#: hidden_states [..., H], topk_ids [T, k] and topk_weights [T, k].
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# All that the checks of a plain tensor depend on.
_kind = operator.attrgetter("shape", "dtype", "layout", "device")


class Like(NamedTuple):
    """Tokens T, dtype and device of hidden states. The result of the batch has the same."""

    tokens: int
    dtype: torch.dtype
    device: torch.device


class BatchChecks:
    """Checks the batches of one layer. ``where`` names the layer in errors."""

    def __init__(self, where: str, hidden_size: int, top_k: int) -> None:
        self.where, self.hidden_size, self._top_k = where, hidden_size, top_k
        self._last: tuple[Any, Like] | None = None  # the last result of plain tensors

    def batch(self, hidden_states: Any, topk_ids: Any, topk_weights: Any) -> tuple[Any, Like]:
        """Checks hidden_states [..., H], topk_ids [T, k] and topk_weights [T, k].

        Checking takes longer than starting a batch, so the last kind is remembered.

        Returns:
            What the checks depended on, the same object for all batches of one kind in a row (None
            for tensors that are not plain ones, which are always checked), and the result's Like.

        Raises:
            TypeError: not tensors.
            ValueError: a wrong shape or dtype, or a tensor without memory of its own.
        """
        x, ids, weights = hidden_states, topk_ids, topk_weights
        kinds = None
        if type(x) is type(ids) is type(weights) is torch.Tensor and not (
            x.is_nested or ids.is_nested or weights.is_nested
        ):
            kinds = _kind(x), _kind(ids), _kind(weights)
            if self._last is not None and kinds == self._last[0]:
                return self._last
        checked = kinds, self._check(x, ids, weights)
        if kinds is not None:
            self._last = checked
        return checked

    def hidden(self, hidden_states: Any) -> Like:
        """Checks hidden_states [..., H] alone. Raises as ``batch`` does."""
        last = self._last
        if (
            last is not None
            and type(hidden_states) is torch.Tensor
            and not hidden_states.is_nested
            and _kind(hidden_states) == last[0][0]
        ):
            return last[1]
        place = f"{self.where}: hidden_states"
        need_tensor(place, hidden_states)
        need_dense(place, hidden_states)
        dtype, shape = hidden_states.dtype, hidden_states.shape
        if dtype not in DTYPES:
            raise ValueError(f"{place} has dtype {dtype}; accepted: {DTYPE_NAMES}")
        if not shape or shape[-1] != self.hidden_size:
            raise ValueError(f"{place} must be [..., {self.hidden_size}], got {list(shape)}")
        return Like(hidden_states.numel() // self.hidden_size, dtype, hidden_states.device)

    def _check(self, hidden_states: Any, topk_ids: Any, topk_weights: Any) -> Like:
        routes = {"topk_ids": topk_ids, "topk_weights": topk_weights}
        for name, tensor in ({"hidden_states": hidden_states} | routes).items():
            need_tensor(f"{self.where}: {name}", tensor)
        like, k = self.hidden(hidden_states), self._top_k
        for name, tensor in routes.items():
            place = f"{self.where}: {name}"
            need_dense(place, tensor)
            shape = list(tensor.shape)
            if not shape or shape[-1] != k or tensor.numel() != like.tokens * k:
                raise ValueError(f"{place} must be [{like.tokens}, {k}], got {shape}")
        place, dtype = f"{self.where}: topk_ids", topk_ids.dtype
        if not is_integer(topk_ids):
            raise ValueError(f"{place} has dtype {dtype}; accepted: integer dtypes")
        place, dtype = f"{self.where}: topk_weights", topk_weights.dtype
        if not dtype.is_floating_point:
            raise ValueError(f"{place} has dtype {dtype}; accepted: float dtypes")
        return like
