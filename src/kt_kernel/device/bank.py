"""Memory of batches between a device and the CPU, shared by the layers of a model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..runtime.tensors import DTYPES
from ..runtime.variant import native

_CELL = 2  # int32 per side in device memory: programs that arrived, number of the last entry
_CACHE_LINE = 16  # int32
_KEPT_VIEWS = 512  # tokens


class BankKey(NamedTuple):
    """Everything that shapes a bank's memory."""

    dtype: torch.dtype
    hidden: int
    top_k: int
    deferring: bool
    capacity: int = 0  # tokens; 0: any


class Side:
    """Memory of one batch in flight: pinned memory, and a cell of counters on the device."""

    def __init__(self, core: Any, cell: torch.Tensor) -> None:
        self.core = core  # the compiled core's StreamSide
        self.cell = cell  # int32 [_CELL]
        self.batches = 0  # so far
        # Addresses in the order of the kernels' parameters.
        self.inputs = (
            core.x_address,
            core.ids_address,
            core.weights_address,
            core.tokens_address,
            core.times_address,
            core.done_address,
            cell.data_ptr(),
        )
        self.answer = (core.out_address, core.times_address, core.done_address, cell.data_ptr())


class Rows:
    """Device memory whose first rows are returned, as the same tensor for the same number."""

    def __init__(self, capacity: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        with torch.inference_mode(False):  # or it could not be written outside of it
            self._whole = torch.empty((capacity, width), dtype=dtype, device=device)
        self._first: dict[int, torch.Tensor] = {}

    def of(self, tokens: int) -> torch.Tensor:
        found = self._first.get(tokens)
        if found is None:
            found = self._whole[:tokens]
            if tokens <= _KEPT_VIEWS:  # of decode; prompts have too many sizes
                self._first[tokens] = found
        return found

    @property
    def nbytes(self) -> int:
        return self._whole.nbytes


class Bank:
    """The two sides that the layers of a model use in turns, for batches of up to ``capacity``.

    They alternate, so that the next layer's batch does not overwrite one whose deferred experts the
    CPU still computes, and so that two submits of one layer may be outstanding.
    """

    def __init__(self, backend: Any, key: BankKey) -> None:
        self.key = key
        self.capacity = key.capacity
        self.captured = False  # by a graph: the memory must never move
        self._backend = backend
        self._turn = 0
        self._last_position = -1
        self.stream: int | None = None  # handle of the stream of the last batch
        self.batches = 0  # so far
        self._routes: dict[tuple[int, torch.dtype], Rows] = {}
        cells = torch.zeros((2, _CACHE_LINE), dtype=torch.int32, device=backend.device)
        self.sides: list[Side] = []
        try:
            for cell in cells:
                core = native().StreamSide(
                    key.capacity, key.hidden, key.top_k, DTYPES[key.dtype], key.deferring
                )
                backend.pin(core.buffer)
                self.sides.append(Side(core, cell[:_CELL]))
        except BaseException:
            self.free()
            raise

    def next_side(self, position: int) -> int:
        """The side for the batch that the layer at this position of its chain submits now."""
        if position <= self._last_position:  # a new pass
            self._turn ^= 1
        self._last_position = position
        return (position + self._turn) & 1

    def routes(self, side: int, dtype: torch.dtype, tokens: int, capturing: bool) -> torch.Tensor:
        """A device buffer [tokens, k] for routes, valid until the side's next batch."""
        rows = self._routes.get((side, dtype))
        if rows is None:
            if capturing:  # it would be in the graph's own memory
                return torch.empty(
                    (tokens, self.key.top_k), dtype=dtype, device=self._backend.device
                )
            rows = self._routes[side, dtype] = Rows(
                self.capacity, self.key.top_k, dtype, self._backend.device
            )
        return rows.of(tokens)

    @property
    def nbytes(self) -> int:
        pinned = sum(side.core.buffer.nbytes for side in self.sides)
        return pinned + sum(rows.nbytes for rows in self._routes.values())

    def free(self) -> None:
        """Frees the memory, which the device must no longer use."""
        for side in self.sides:
            self._backend.unpin(side.core.buffer)
        self.sides.clear()
        self._routes.clear()
