"""One layer's calls on one device: submit and collect as kernels on the caller's stream."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, NamedTuple

import torch

from ..streams import handle_of, on_stream
from . import kernels
from .bank import Bank, BankKey, Side
from .engine import DeviceEngine

_WARPS = 8
_BLOCK = 4096  # elements that a program copies at a time, at most
_MAX_PROGRAMS = 64  # of one launch; each of `take_back` polls the CPU's answer
# Of router weights and ids too; other kinds of floats are converted.
_DTYPES = {
    torch.bfloat16, torch.float16, torch.float32, torch.float64,
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip
_ALIGNMENT = 16  # bytes, of all addresses: the kernels are compiled for it


class Batch(NamedTuple):
    """A submitted batch."""

    stream: LayerStream
    bank: Bank
    side: Side
    number: int  # among the side's batches
    tokens: int

    def collect(self, cuda_stream: Any) -> torch.Tensor:
        """Lets the stream wait for the CPU's sum [T, H]; a buffer valid until the next but one."""
        self._need_side()
        if self.stream.backend.capturing() and not self.bank.has_results:
            raise RuntimeError(
                f"{self.stream.where}: the result of a batch is captured in a CUDA graph but has "
                "no memory yet; collect a batch of that size once before the capture"
            )
        return self.stream.collect(self, self.bank.result(self.tokens), cuda_stream)

    def collect_and_add(
        self, hot: torch.Tensor | None, cuda_stream: Any, scale: float
    ) -> torch.Tensor:
        """Lets the stream wait for scale * (the CPU's sum + hot); written over hot, if given."""
        self._need_side()
        backend, key = self.stream.backend, self.bank.key
        if hot is None:
            with on_stream(backend.device, cuda_stream):
                out = torch.empty((self.tokens, key.hidden), dtype=key.dtype, device=backend.device)
        elif tuple(hot.shape) != (self.tokens, key.hidden) or hot.dtype != key.dtype:
            raise ValueError(
                f"{self.stream.where}: hot is {list(hot.shape)} {hot.dtype}; expected "
                f"[{self.tokens}, {key.hidden}] {key.dtype}"
            )
        elif hot.is_contiguous() and hot.data_ptr() % _ALIGNMENT == 0:
            out = hot
        else:
            out = hot = self.stream._as_kernels_want(hot, self.tokens, cuda_stream)
        return self.stream.collect(self, out, cuda_stream, hot, scale)

    def _need_side(self) -> None:
        if self.side.batches != self.number:
            raise RuntimeError(
                f"{self.stream.where}: the result of a batch is asked for after its buffers went "
                "to another one; at most two batches of a model may wait for their results"
            )


class _Plan(NamedTuple):
    """What does not change between two batches alike."""

    run: Any  # of hand_over
    behind: tuple[int, ...]  # its arguments behind those of the batch
    slot: int


class LayerStream:
    """The hand-over of one layer on one device.

    core: the compiled MoeLayer; where: names the layer in errors; smallest: tokens for which its
    first bank has room.
    """

    def __init__(
        self, engine: DeviceEngine, core: Any, where: str, chain: Any, *,
        experts: int, hidden: int, top_k: int, smallest: int,
    ) -> None:  # fmt: skip
        self.backend, self.where = engine.backend, where
        self._engine, self._core = engine, core
        self._chain = weakref.ref(chain)  # whose end frees the banks
        self._experts, self._hidden, self._top_k = experts, hidden, top_k
        self._smallest = smallest
        self._banks: dict[tuple[torch.dtype, bool], list[Bank]] = {}
        self._slots: dict[Any, int] = {}
        self._block = min(_BLOCK, 1 << (hidden - 1).bit_length())
        self._blocks = -(-hidden // self._block)
        self._unused = (engine.counter.data_ptr(),) * 3  # for what a kernel does not look at
        self._plans: dict[Any, _Plan] = {}

    def submit(
        self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor,
        tokens: int, cuda_stream: Any, place: tuple[int, int], *,
        deferring: bool, split: tuple[torch.Tensor, int] | None = None,
    ) -> tuple[Batch, tuple[torch.Tensor, torch.Tensor] | None]:  # fmt: skip
        """Hands over hidden [..., H], ids and weights [T, k], T > 0.

        place: position in the chain, and how many routes of a token are not deferred (k where the
        layer does not defer); deferring: whether layers of its model do. split: (slot_map, cold
        slot) asks for the routes of the device's experts, see `kernels.hand_over`. Raises
        RuntimeError for what went wrong on the CPU before.
        """
        engine = self._engine
        engine.core.raise_error()
        stream = handle_of(self.backend.device, cuda_stream)
        inputs = hidden, topk_ids, topk_weights
        addresses = [tensor.data_ptr() for tensor in inputs]
        for i, tensor in enumerate(inputs):
            if (
                addresses[i] % _ALIGNMENT or not tensor.is_contiguous()
                or tensor.dtype not in _DTYPES or tensor.device != self.backend.device
            ):  # fmt: skip
                copies = [self._as_kernels_want(t, tokens, cuda_stream) for t in inputs]
                return self.submit(
                    *copies, tokens, cuda_stream, place, deferring=deferring, split=split
                )
        bank = self._bank(hidden.dtype, deferring, tokens)
        index = bank.next_side(place[0])
        side = bank.sides[index]
        routes = None
        if split is not None:
            routes = (
                bank.routes(index, topk_ids.dtype, tokens),
                bank.routes(index, topk_weights.dtype, tokens),
            )
            addresses += [split[0].data_ptr(), routes[0].data_ptr(), routes[1].data_ptr()]
        else:
            addresses += self._unused
        cold_slot = None if split is None else split[1]
        key = (bank, index, place, topk_ids.dtype, topk_weights.dtype, cold_slot)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(*key)
        bank.captured |= self.backend.capturing()
        side.batches += 1
        plan.run(
            min(tokens * self._blocks, _MAX_PROGRAMS), stream, *addresses, *plan.behind,
            tokens, plan.slot, 0, 0,
        )  # fmt: skip
        engine.core.wake()
        return Batch(self, bank, side, side.batches, tokens), routes

    def _plan(
        self, bank: Bank, index: int, place: tuple[int, int], ids: torch.dtype,
        weights: torch.dtype, cold_slot: int | None,
    ) -> _Plan:  # fmt: skip
        engine, side = self._engine, bank.sides[index]
        launch = self._hand_over(bank.key.dtype, ids, weights, cold_slot)
        slot = self._slots.get((bank, index, place))
        if slot is None:
            slot = self._slots[bank, index, place] = engine.core.add_slot(
                self._core, self.where, side.core, self._chain().number, *place
            )
        behind = (
            *side.inputs, engine.counter.data_ptr(), engine.core.ring_address,
            engine.core.head_address,
        )  # fmt: skip
        return _Plan(launch.run, behind, slot)

    def collect(
        self, batch: Batch, out: torch.Tensor, cuda_stream: Any,
        hot: torch.Tensor | None = None, scale: float = 1.0,
    ) -> torch.Tensor:  # fmt: skip
        """Lets the stream wait for out [T, H] = scale * (the CPU's sum, plus hot); returns it."""
        self._take_back(out.dtype, hot is not None, scale).run(
            min(batch.tokens * self._blocks, _MAX_PROGRAMS),
            handle_of(self.backend.device, cuda_stream), *batch.side.answer,
            self._unused[0] if hot is None else hot.data_ptr(), out.data_ptr(), batch.tokens, 0, 0,
        )  # fmt: skip
        return out

    def _bank(self, dtype: torch.dtype, deferring: bool, tokens: int) -> Bank:
        key = BankKey(dtype, self._hidden, self._top_k, deferring)
        banks = self._banks.get((dtype, deferring))
        if banks is None:
            banks = self._banks[dtype, deferring] = self._engine.banks(self._chain(), key)
        for bank in banks:
            if bank.capacity >= tokens:
                return bank
        return self._engine.add_bank(banks, key, self._smallest, tokens)

    def _as_kernels_want(self, tensor: torch.Tensor, tokens: int, cuda_stream: Any) -> torch.Tensor:
        """A copy [tokens, n] on the device, contiguous, aligned and of a type that kernels read."""
        with on_stream(self.backend.device, cuda_stream):
            if tensor.dtype not in _DTYPES:  # float8
                tensor = tensor.float()
            rows = tensor.detach().to(self.backend.device).reshape(tokens, -1)
            return rows.clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        """Lets go of the weights; a graph that still calls the layer gets zeros and an error."""
        with contextlib.suppress(Exception):
            if self._slots and not self.backend.capturing():
                self.backend.synchronize()  # what was launched needs the weights
        for slot in self._slots.values():
            self._engine.core.drop_slot(slot)
        self._slots.clear()
        self._plans.clear()

    # ---- kernels ----------------------------------------------------------------------------

    def _hand_over(
        self, x: torch.dtype, ids: torch.dtype, weights: torch.dtype, cold_slot: int | None
    ) -> Any:
        key = ("hand_over", x, ids, weights, self._hidden, self._top_k, self._experts, cold_slot)
        launch = self._engine.launches.get(key)
        if launch is None:
            int32, int64, float32 = torch.int32, torch.int64, torch.float32
            launch = self._compile(
                key, kernels.hand_over,
                (x, ids, weights, int32, ids, weights,
                 x, int32, float32, int32, int32, int32, int64, int32, 0, 0),
                TOP_K=self._top_k, EXPERTS=self._experts, ENTRIES=self._engine.core.entries,
                SPLIT=cold_slot is not None, COLD_SLOT=cold_slot or 0,
                ROUTES=kernels.ROUTES, ROOM_CHECK=kernels.ROOM_CHECK,
            )  # fmt: skip
        return launch

    def _take_back(self, dtype: torch.dtype, add: bool, scale: float) -> Any:
        key = ("take_back", dtype, self._hidden, add, scale)
        launch = self._engine.launches.get(key)
        if launch is None:
            int32 = torch.int32
            launch = self._compile(
                key, kernels.take_back, (dtype, int32, int32, dtype, dtype, 0),
                ADD=add, SCALE=scale,
            )  # fmt: skip
        return launch

    def _compile(self, key: Any, function: Any, arguments: Any, **constants: Any) -> Any:
        if self.backend.capturing():
            raise RuntimeError(
                f"{self.where}: a batch of another kind than those before is captured in a CUDA "
                "graph; run it once before the capture, so that its kernels are compiled"
            )
        launch = self._engine.launches[key] = self.backend.compile(
            function, arguments, _WARPS, HIDDEN=self._hidden, BLOCK=self._block,
            FENCE=self.backend.device.type == "cuda", **constants,
        )  # fmt: skip
        return launch
