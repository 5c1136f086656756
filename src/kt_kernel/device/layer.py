"""One layer's calls on one device: submit and collect as kernels on the caller's stream."""

from __future__ import annotations

import contextlib
import time
import weakref
from typing import Any, NamedTuple

import torch

from .. import buffers
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
_CLOSE_SECONDS = 5.0
_ALIGNMENT = 16  # bytes, of all addresses: the kernels are compiled for it


class Batch(NamedTuple):
    """A submitted batch."""

    layer: LayerStream
    bank: Bank
    side: Side
    number: int  # among the batches of its side, or of its bank where layers defer
    tokens: int
    stream: int  # handle of the stream that it was submitted on

    def collect(self, cuda_stream: Any) -> torch.Tensor:
        """Lets the stream wait for the CPU's sum [T, H]; a buffer valid until the next but one."""
        stream, capturing = self._ready(cuda_stream)
        key, device = self.bank.key, self.layer.backend.device
        out = buffers.device_result(
            (self.layer.chain_number, self.tokens, key.hidden, key.top_k, key.dtype, device),
            (self.tokens, key.hidden), key.dtype, device, capturing,
        )  # fmt: skip
        if out is None:
            raise RuntimeError(
                f"{self.layer.where}: the result of a batch of {self.tokens} tokens is captured in "
                "a CUDA graph but has no memory yet; collect a batch of that size once before"
            )
        return self.layer.take_back(self, out, stream, capturing)

    def collect_and_add(
        self, hot: torch.Tensor | None, cuda_stream: Any, scale: float
    ) -> torch.Tensor:
        """Lets the stream wait for scale * (the CPU's sum + hot); written over hot, if given."""
        device, key = self.layer.backend.device, self.bank.key
        stream, capturing = self._ready(cuda_stream)
        if hot is None:
            with on_stream(device, cuda_stream):
                out = torch.empty((self.tokens, key.hidden), dtype=key.dtype, device=device)
        elif (
            tuple(hot.shape) != (self.tokens, key.hidden) or hot.dtype != key.dtype
            or hot.device != device
        ):  # fmt: skip
            raise ValueError(
                f"{self.layer.where}: hot is {list(hot.shape)} {hot.dtype} on {hot.device}; "
                f"expected [{self.tokens}, {key.hidden}] {key.dtype} on {device}"
            )
        elif hot.is_contiguous() and hot.data_ptr() % _ALIGNMENT == 0:
            out = hot
        else:
            out = hot = self.layer.copy_for_kernels(hot, self.tokens, cuda_stream)
        return self.layer.take_back(self, out, stream, capturing, hot, scale)

    def _ready(self, cuda_stream: Any) -> tuple[int, bool]:
        """The stream's handle, and whether a graph is captured on it. RuntimeError where the result
        is not to be had there any more, or something went wrong on the CPU before."""
        layer = self.layer
        layer.engine.core.raise_error()
        counted = self.bank if self.bank.key.deferring else self.side
        if counted.batches != self.number:
            raise RuntimeError(
                f"{layer.where}: the result of a batch is asked for after its buffers went to "
                "another one; of a model two batches may wait for their results, one where experts "
                "are deferred"
            )
        stream = handle_of(layer.backend.device, cuda_stream)
        capturing = layer.backend.capturing(stream)
        if stream != self.stream:
            if capturing:
                raise RuntimeError(
                    f"{layer.where}: a batch is collected on another stream than it was submitted "
                    "on, in a CUDA graph; both must be on one stream there"
                )
            layer.backend.synchronize()  # until the batch is handed over
        return stream, capturing


class _Slot:
    """A number of the core's, and how many batches were launched with it outside of graphs."""

    def __init__(self, number: int, bank: Bank) -> None:
        self.number, self.bank, self.launched = number, bank, 0


class _Plan(NamedTuple):
    """What does not change between two batches alike."""

    run: Any  # of hand_over
    behind: tuple[int, ...]  # its arguments behind those of the batch
    slot: _Slot
    split: tuple[torch.Tensor, int] | None


class LayerStream:
    """The hand-over of one layer on one device.

    core: the compiled MoeLayer; where: names the layer in errors; smallest: tokens for which its
    first bank has room.
    """

    def __init__(
        self, engine: DeviceEngine, core: Any, where: str, chain: Any, *,
        experts: int, hidden: int, top_k: int, smallest: int,
    ) -> None:  # fmt: skip
        self.engine, self.backend, self.where = engine, engine.backend, where
        self._core = core
        self._chain = weakref.ref(chain)  # whose end frees the banks
        self.chain_number = chain.number
        self._experts, self._hidden, self._top_k = experts, hidden, top_k
        self._smallest = smallest
        self._banks: dict[tuple[torch.dtype, bool], list[Bank]] = {}
        self._slots: dict[Any, _Slot] = {}
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
        engine = self.engine
        engine.core.raise_error()
        stream = handle_of(self.backend.device, cuda_stream)
        inputs = hidden, topk_ids, topk_weights
        addresses = [tensor.data_ptr() for tensor in inputs]
        for i, tensor in enumerate(inputs):
            if (
                addresses[i] % _ALIGNMENT or not tensor.is_contiguous()
                or tensor.dtype not in _DTYPES or tensor.device != self.backend.device
            ):  # fmt: skip
                copies = [self.copy_for_kernels(t, tokens, cuda_stream) for t in inputs]
                return self.submit(
                    *copies, tokens, cuda_stream, place, deferring=deferring, split=split
                )
        capturing = self.backend.capturing(stream)
        bank = self._bank(hidden.dtype, deferring, tokens, capturing)
        if capturing:
            engine.keep_for_ever(bank)
        elif stream != bank.stream and bank.stream is not None:
            self.backend.synchronize()  # the other stream may still use the sides
        bank.stream = stream
        index = bank.next_side(place[0])
        side = bank.sides[index]
        routes, slot_map = None, None
        if split is not None:
            slot_map = split[0].data_ptr()
            routes = (
                bank.routes(index, topk_ids.dtype, tokens, capturing),
                bank.routes(index, topk_weights.dtype, tokens, capturing),
            )
            addresses += [slot_map, routes[0].data_ptr(), routes[1].data_ptr()]
        else:
            addresses += self._unused
        cold_slot = None if split is None else split[1]
        key = (bank, index, place, topk_ids.dtype, topk_weights.dtype, cold_slot, slot_map)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(*key[:-1], split, capturing)
        side.batches += 1
        bank.batches += 1
        plan.run(
            min(tokens * self._blocks, _MAX_PROGRAMS), stream, *addresses, *plan.behind,
            tokens, plan.slot.number, 0, 0,
        )  # fmt: skip
        if not capturing:
            plan.slot.launched += 1
        engine.core.wake()
        number = bank.batches if deferring else side.batches
        return Batch(self, bank, side, number, tokens, stream), routes

    def _plan(
        self, bank: Bank, index: int, place: tuple[int, int], ids: torch.dtype,
        weights: torch.dtype, cold_slot: int | None, split: tuple[torch.Tensor, int] | None,
        capturing: bool,
    ) -> _Plan:  # fmt: skip
        engine, side = self.engine, bank.sides[index]
        if split is not None:
            slot_map = split[0]
            if (
                slot_map.dtype != torch.int32 or slot_map.device != self.backend.device
                or tuple(slot_map.shape) != (self._experts,) or not slot_map.is_contiguous()
            ):  # fmt: skip
                raise ValueError(
                    f"{self.where}: slot_map is {list(slot_map.shape)} {slot_map.dtype} on "
                    f"{slot_map.device}; expected [{self._experts}] torch.int32, contiguous, on "
                    f"{self.backend.device}"
                )
        launch = self._hand_over(bank.key.dtype, ids, weights, cold_slot, capturing)
        slot = self._slots.get((bank, index, place))
        if slot is None:
            number = engine.core.add_slot(
                self._core, self.where, side.core, self.chain_number, *place
            )
            slot = self._slots[bank, index, place] = _Slot(number, bank)
            if engine.tracer is not None:
                engine.tracer.name(number, self.where)
        behind = (
            *side.inputs, engine.counter.data_ptr(), engine.core.ring_address,
            engine.core.head_address,
        )  # fmt: skip
        # slot_map is kept, since its address is part of the key.
        return _Plan(launch.run, behind, slot, split)

    def take_back(
        self, batch: Batch, out: torch.Tensor, stream: int, capturing: bool,
        hot: torch.Tensor | None = None, scale: float = 1.0,
    ) -> torch.Tensor:  # fmt: skip
        """Lets the stream wait for out [T, H] = scale * (the CPU's sum, plus hot); returns it."""
        self._take_back(out.dtype, hot is not None, scale, capturing).run(
            min(batch.tokens * self._blocks, _MAX_PROGRAMS), stream, *batch.side.answer,
            self._unused[0] if hot is None else hot.data_ptr(), out.data_ptr(), batch.tokens, 0, 0,
        )  # fmt: skip
        return out

    def _bank(self, dtype: torch.dtype, deferring: bool, tokens: int, capturing: bool) -> Bank:
        key = BankKey(dtype, self._hidden, self._top_k, deferring)
        banks = self._banks.get((dtype, deferring))
        if banks is None:
            banks = self._banks[dtype, deferring] = self.engine.banks(self._chain(), key)
        for bank in banks:
            if bank.capacity >= tokens:
                return bank
        return self.engine.add_bank(banks, key, self._smallest, tokens, capturing)

    def copy_for_kernels(self, tensor: torch.Tensor, tokens: int, cuda_stream: Any) -> torch.Tensor:
        """A copy [tokens, n] on the device, contiguous, aligned and of a type that kernels read."""
        with on_stream(self.backend.device, cuda_stream):
            if tensor.dtype not in _DTYPES:  # float8
                tensor = tensor.float()
            rows = tensor.detach().to(self.backend.device).reshape(tokens, -1)
            return rows.clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        """Lets go of the weights; a graph that still calls the layer gets zeros and an error.

        What was launched and is not handed over yet needs them: it is waited for, but not for long.
        No call of CUDA's, since this runs in whatever thread, at whatever moment.
        """
        core, slots = self.engine.core, list(self._slots.values())
        self._slots.clear()
        self._plans.clear()
        end = time.monotonic() + _CLOSE_SECONDS
        with contextlib.suppress(RuntimeError):  # in a child of a fork
            for slot in slots:
                while core.entries_of(slot.number) < slot.launched and time.monotonic() < end:
                    time.sleep(0.0001)
                core.drop_slot(slot.number, not slot.bank.captured)

    # ---- kernels ----------------------------------------------------------------------------

    def _hand_over(
        self, x: torch.dtype, ids: torch.dtype, weights: torch.dtype, cold_slot: int | None,
        capturing: bool,
    ) -> Any:  # fmt: skip
        key = ("hand_over", x, ids, weights, self._hidden, self._top_k, self._experts, cold_slot)
        launch = self.engine.launches.get(key)
        if launch is None:
            int32, int64, float32 = torch.int32, torch.int64, torch.float32
            launch = self._compile(
                key, capturing, kernels.hand_over,
                (x, ids, weights, int32, ids, weights,
                 x, int32, float32, int32, int64, int32, int32, int64, int32, 0, 0),
                TOP_K=self._top_k, EXPERTS=self._experts, ENTRIES=self.engine.core.entries,
                SPLIT=cold_slot is not None, COLD_SLOT=cold_slot or 0,
                ROUTES=kernels.routes_with(self._blocks, self._top_k),
                ROOM_CHECK=kernels.ROOM_CHECK,
            )  # fmt: skip
        return launch

    def _take_back(self, dtype: torch.dtype, add: bool, scale: float, capturing: bool) -> Any:
        key = ("take_back", dtype, self._hidden, add, scale)
        launch = self.engine.launches.get(key)
        if launch is None:
            int32 = torch.int32
            launch = self._compile(
                key, capturing, kernels.take_back,
                (dtype, torch.int64, int32, int32, dtype, dtype, 0),
                ADD=add, SCALE=scale,
            )  # fmt: skip
        return launch

    def _compile(
        self, key: Any, capturing: bool, function: Any, arguments: Any, **constants: Any
    ) -> Any:
        if capturing:
            raise RuntimeError(
                f"{self.where}: a batch of another kind than those before is captured in a CUDA "
                "graph; run it once before the capture, so that its kernels are compiled"
            )
        launch = self.engine.launches[key] = self.backend.compile(
            function, arguments, _WARPS, HIDDEN=self._hidden, BLOCK=self._block,
            FENCE=self.backend.device.type == "cuda", TRACE=self.engine.tracer is not None,
            **constants,
        )  # fmt: skip
        return launch
