"""The order of a model's MoE layers, which deferral follows.

The layers of one model form a chain in the order of their construction. A layer's deferred sum is
offered to the next submit of the chain. The following layer takes it; any other layer (a new pass,
a skipped layer, another batch) drops it. So no sum outlives its pass.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

_numbers = itertools.count()


@dataclass
class Carry:
    """A deferred float32 sum on its way from one layer to the next."""

    position: int  # of the layer that deferred
    key: Hashable  # must be equal for the next layer to take it: tokens, device, process
    partial: Any  # float32 [T, H]


class ModelChain:
    """MoE layers of one model, weakly held, in order of construction."""

    def __init__(self, settings: Hashable) -> None:
        self.number = next(_numbers)  # unique in the process
        self.settings = settings
        self.last_layer_idx = -1
        self.order = object()  # a new object whenever positions change
        self._members: list[weakref.ref[Any]] = []
        self._carry: Carry | None = None

    def append(self, layer: Any, layer_idx: int) -> None:
        self.last_layer_idx = layer_idx
        self._members.append(weakref.ref(layer, self._forget))
        self.order = object()

    def _forget(self, reference: weakref.ref[Any]) -> None:
        # The carry has old positions, so it is dropped, too.
        self._members = [member for member in self._members if member is not reference]
        self.order = object()
        self._carry = None

    def position(self, layer: Any) -> int:
        for index, member in enumerate(self._members):
            if member() is layer:
                return index
        raise LookupError("layer is not part of this chain")

    def is_last(self, layer: Any) -> bool:
        return self._members[-1]() is layer

    def take(self, layer: Any, key: Hashable) -> Any | None:
        """The sum that the previous layer deferred to this one, or None. Clears the offer."""
        carry, self._carry = self._carry, None
        if carry is None or carry.key != key or carry.position + 1 != self.position(layer):
            return None
        return carry.partial

    def offer(self, layer: Any, key: Hashable, partial: Any) -> None:
        self._carry = Carry(self.position(layer), key, partial)


class _Current(threading.local):
    chain: weakref.ref[ModelChain] | None = None
    scope: ModelScope | None = None


_current = _Current()


class ModelScope:
    """Marks layers as those of one model; may be entered any number of times.

    All layers constructed inside form one chain, whatever their layer index, and no layer
    constructed outside belongs to it.
    """

    def __init__(self) -> None:
        self._chain: ModelChain | None = None
        self._outer: list[ModelScope | None] = []

    def __enter__(self) -> ModelScope:
        self._outer.append(_current.scope)
        _current.scope = self
        return self

    def __exit__(self, *exception: object) -> None:
        _current.scope = self._outer.pop()


def model_scope() -> ModelScope:
    """A new ``ModelScope``: ``with model_scope(): ...`` around the construction of a model.

    Only needed if the layer index does not distinguish models: for a draft model whose numbers
    continue those of the main model, or for models constructed in turns.
    """
    return ModelScope()


def join_chain(layer: Any, layer_idx: int, settings: Hashable) -> ModelChain:
    """Appends a newly constructed layer to the chain of its model and returns the chain.

    Outside a ``ModelScope``, a new chain starts if the layer index does not grow (another model). A
    new chain always starts if ``settings`` (hidden size, k, pools) differ, because such layers
    cannot pass sums to each other.
    """
    scope = _current.scope
    if scope is not None:
        chain = scope._chain
        if chain is None or chain.settings != settings:
            chain = scope._chain = ModelChain(settings)
    else:
        chain = _current.chain() if _current.chain is not None else None
        if chain is None or chain.settings != settings or layer_idx <= chain.last_layer_idx:
            chain = ModelChain(settings)
            _current.chain = weakref.ref(chain)
    chain.append(layer, layer_idx)
    return chain
