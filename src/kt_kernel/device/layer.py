"""One layer on one device: submit and collect, as kernels on the caller's stream."""

from __future__ import annotations

import contextlib
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from ..moe import buffers
from ..runtime.streams import handle_of, on_stream
from . import kernels
from .bank import Bank, BankKey, Side
from .engine import DeviceEngine

_WARPS = 8
_BLOCK = 4096  # maximum number of elements that a program copies at a time
_MAX_PROGRAMS = 64  # of one launch; each of `take_back` polls the CPU's answer
# Also of router weights and ids; other kinds of floats are converted.
_DTYPES = {
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}
# What the kernel reads of masks of padding.
_PADDING = {torch.bool: torch.uint8, torch.int64: torch.int64, None: torch.int32}
_CLOSE_SECONDS = 5.0
_SETTLE_SECONDS = 60.0
_ALIGNMENT = 16  # bytes, of all addresses except padding: the kernels are compiled for it


@dataclass(slots=True, eq=False)
class Batch:
    """A submitted batch."""

    layer: LayerStream
    plan: _Plan
    number: int  # among the batches of plan.counted
    stream: int  # handle of the stream that it was submitted on

    def collect(self, cuda_stream: Any) -> torch.Tensor:
        """Makes the stream wait for the CPU's sum [T, H]; a buffer valid until the next batch but
        one."""
        stream, capturing = self._ready(cuda_stream)
        layer, plan = self.layer, self.plan
        out = buffers.device_result(
            layer.chain_number, plan.shape, plan.dtype, layer.backend.device, capturing
        )
        if out is None:
            raise RuntimeError(
                f"{layer.where}: collecting a batch of {plan.shape[0]} tokens is captured in a "
                "CUDA graph but has no memory yet; collect a batch of that size once before"
            )
        return layer.take_back(self, out, stream, capturing)

    def collect_and_add(
        self, hot: torch.Tensor | None, cuda_stream: Any, scale: float
    ) -> torch.Tensor:
        """Makes the stream wait for scale * (the CPU's sum + hot); overwrites hot, if given."""
        shape, dtype = self.plan.shape, self.plan.dtype
        device = self.layer.backend.device
        stream, capturing = self._ready(cuda_stream)
        if hot is None:
            with on_stream(device, cuda_stream):
                out = torch.empty(shape, dtype=dtype, device=device)
        elif hot.shape != shape or hot.dtype != dtype or hot.device != device:
            raise ValueError(
                f"{self.layer.where}: hot is {list(hot.shape)} {hot.dtype} on {hot.device}; "
                f"expected {list(shape)} {dtype} on {device}"
            )
        elif hot.is_contiguous() and hot.data_ptr() % _ALIGNMENT == 0:
            out = hot
        else:
            out = hot = self.layer.copy_for_kernels(hot, shape[0], cuda_stream)
        return self.layer.take_back(self, out, stream, capturing, hot, scale)

    def _ready(self, cuda_stream: Any) -> tuple[int, bool]:
        """The stream's handle, and whether a graph is captured on it. RuntimeError if the result is
        lost, or after an earlier error on the CPU."""
        layer = self.layer
        layer.engine.core.raise_error()
        if self.plan.counted.batches != self.number:
            raise RuntimeError(
                f"{layer.where}: a later batch already uses the buffers of this batch, so its "
                "result is lost; at most two batches per model may be outstanding, or one if "
                "experts are deferred"
            )
        backend = layer.backend
        stream = handle_of(backend.device, cuda_stream)
        capturing = backend.capturing(stream)
        if stream != self.stream:
            if capturing:
                raise RuntimeError(
                    f"{layer.where}: in a CUDA graph, a batch must be collected on the stream that "
                    "it was submitted on"
                )
            backend.synchronize()  # until the batch is handed over
        return stream, capturing


class _Slot:
    """A slot number of the core, and how many batches were launched with it outside of graphs."""

    def __init__(self, number: int, bank: Bank) -> None:
        self.number, self.bank, self.launched = number, bank, 0


@dataclass(slots=True, eq=False)
class _Plan:
    """The constants of batches of the same kinds, place, side and split."""

    place: tuple[int, int]
    slot_map: torch.Tensor | None  # kept alive, because it is compared by its address
    slot_map_address: int | None
    cold_slot: int | None
    padding: torch.dtype | None
    bank: Bank
    side: Side
    counted: Bank | Side  # whose batches are counted: a later batch reuses the buffers
    shape: tuple[int, int]  # [T, H]
    dtype: torch.dtype
    slot: _Slot
    routes: tuple[torch.Tensor, torch.Tensor] | None
    hand_over: Any  # launches it: stream, addresses of x, ids, weights and padding
    # The same for take_back: stream, addresses of hot and out; by whether hot is added, and scale.
    take_back: dict[tuple[bool, float], Any] = field(default_factory=dict)


class _Known:
    """The bank of the last readable kinds of batch, and a plan for each side."""

    def __init__(self, kinds: Any, bank: Bank) -> None:
        self.kinds, self.bank = kinds, bank
        self.plans: list[_Plan | None] = [None, None]


class LayerStream:
    """The hand-over of one layer on one device.

    core: the compiled MoeLayer. where: names the layer in errors. smallest: capacity of its first
    bank, in tokens.
    """

    def __init__(
        self,
        engine: DeviceEngine,
        core: Any,
        where: str,
        chain: Any,
        *,
        experts: int,
        hidden: int,
        top_k: int,
        smallest: int,
    ) -> None:
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
        self._unused = (engine.counter.data_ptr(),) * 3  # for arguments that a kernel does not use
        self._known: _Known | None = None
        self._only_cold = False

    def hand_over_only_cold(self) -> None:
        """From now on, the CPU does not get the routes that a split gives to the device. Call it
        before any batch is captured in a CUDA graph."""
        self._only_cold = True
        self._known = None  # its plans are for the other kernel

    def submit(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        tokens: int,
        cuda_stream: Any,
        place: tuple[int, int],
        *,
        deferring: bool,
        split: tuple[torch.Tensor, int] | None = None,
        padding: torch.Tensor | None = None,
        kinds: Any = None,
    ) -> tuple[Batch, tuple[torch.Tensor, torch.Tensor] | None]:
        """Hands over hidden [..., H], ids and weights [T, k], T > 0.

        place: position in the chain, and how many routes of a token are not deferred (k where the
        layer does not defer); deferring: whether layers of its model do. split: (slot_map, cold
        slot) asks for the routes of the device's experts, see `kernels.hand_over`. padding: a mask
        as `routing.need_padding` takes it, on the device. kinds: the same
        object in all calls whose tensors have the same shapes, dtypes and devices, and whose
        deferring is the same; None: not known. Raises RuntimeError for what went wrong on the CPU
        before.
        """
        engine, backend = self.engine, self.backend
        core = engine.core
        core.raise_error()
        stream = handle_of(backend.device, cuda_stream)
        x, ids, weights = hidden.data_ptr(), topk_ids.data_ptr(), topk_weights.data_ptr()
        known = self._known
        if kinds is None or known is None or known.kinds is not kinds:
            known = None
        if (
            (x | ids | weights) % _ALIGNMENT
            or not hidden.is_contiguous()
            or not topk_ids.is_contiguous()
            or not topk_weights.is_contiguous()
            or (known is None and not self._readable(hidden, topk_ids, topk_weights))
        ):
            hidden, topk_ids, topk_weights = (
                self.copy_for_kernels(tensor, tokens, cuda_stream)
                for tensor in (hidden, topk_ids, topk_weights)
            )
            return self.submit(
                hidden,
                topk_ids,
                topk_weights,
                tokens,
                cuda_stream,
                place,
                deferring=deferring,
                split=split,
                padding=padding,
            )
        capturing = backend.capturing(stream)
        if known is None:
            bank = self._bank(hidden.dtype, deferring, tokens, capturing)
            known = self._known = _Known(kinds, bank)
        bank = known.bank
        if capturing:
            engine.keep_for_ever(bank)
        elif stream != bank.stream and bank.stream is not None:
            backend.synchronize()  # the other stream may still be using the sides
        bank.stream = stream
        index = bank.next_side(place[0])
        slot_map, cold_slot = (None, None) if split is None else (split[0].data_ptr(), split[1])
        masked, pads = None, self._unused[0]
        if padding is not None:
            masked, pads = padding.dtype, padding.data_ptr()
        plan = known.plans[index]
        if (
            plan is None
            or plan.slot_map_address != slot_map
            or plan.cold_slot != cold_slot
            or plan.place != place
            or plan.padding is not masked
        ):
            plan = self._plan(
                bank,
                index,
                place,
                topk_ids.dtype,
                topk_weights.dtype,
                tokens,
                split,
                masked,
                capturing,
            )
            if not capturing:  # else its routes may be the graph's
                known.plans[index] = plan
        plan.side.batches += 1
        bank.batches += 1
        plan.hand_over(stream, x, ids, weights, pads)
        if not capturing:
            plan.slot.launched += 1
        core.wake()
        return Batch(self, plan, plan.counted.batches, stream), plan.routes

    def _readable(self, *tensors: torch.Tensor) -> bool:
        device = self.backend.device
        return all(tensor.dtype in _DTYPES and tensor.device == device for tensor in tensors)

    def _plan(
        self,
        bank: Bank,
        index: int,
        place: tuple[int, int],
        ids: torch.dtype,
        weights: torch.dtype,
        tokens: int,
        split: tuple[torch.Tensor, int] | None,
        padding: torch.dtype | None,
        capturing: bool,
    ) -> _Plan:
        engine, side = self.engine, bank.sides[index]
        slot_map, cold_slot = split if split is not None else (None, None)
        routes = None
        of_routes: tuple[int, ...] = self._unused
        if slot_map is not None:
            if (
                slot_map.dtype != torch.int32
                or slot_map.device != self.backend.device
                or tuple(slot_map.shape) != (self._experts,)
                or not slot_map.is_contiguous()
            ):
                raise ValueError(
                    f"{self.where}: slot_map is {list(slot_map.shape)} {slot_map.dtype} on "
                    f"{slot_map.device}; expected [{self._experts}] torch.int32, contiguous, on "
                    f"{self.backend.device}"
                )
            routes = (
                bank.routes(index, ids, tokens, capturing),
                bank.routes(index, weights, tokens, capturing),
            )
            of_routes = tuple(tensor.data_ptr() for tensor in (slot_map, *routes))
        launch = self._hand_over(bank.key.dtype, ids, weights, padding, cold_slot, capturing)
        slot = self._slots.get((bank, index, place))
        if slot is None:
            number = engine.core.add_slot(
                self._core, self.where, side.core, self.chain_number, *place
            )
            slot = self._slots[bank, index, place] = _Slot(number, bank)
            if engine.tracer is not None:
                engine.tracer.name(number, self.where)
        run = launch.bind(
            self._programs(tokens),
            None,
            None,
            None,
            None,
            *of_routes,
            *side.inputs,
            engine.counter.data_ptr(),
            engine.core.ring_address,
            engine.core.head_address,
            tokens,
            slot.number,
            0,
            0,
        ).run
        return _Plan(
            place,
            slot_map,
            None if slot_map is None else of_routes[0],
            cold_slot,
            padding,
            bank,
            side,
            bank if bank.key.deferring else side,
            (tokens, self._hidden),
            bank.key.dtype,
            slot,
            routes,
            run,
        )

    def _programs(self, tokens: int) -> int:
        return min(tokens * self._blocks, _MAX_PROGRAMS)

    def take_back(
        self,
        batch: Batch,
        out: torch.Tensor,
        stream: int,
        capturing: bool,
        hot: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Lets the stream wait for out [T, H] = scale * (the CPU's sum, plus hot); returns it."""
        plan, add = batch.plan, hot is not None
        run = plan.take_back.get((add, scale))
        if run is None:
            launch = self._take_back(plan.dtype, add, scale, capturing)
            run = launch.bind(
                self._programs(plan.shape[0]),
                *plan.side.answer,
                None,
                None,
                plan.shape[0],
                0,
                0,
                wait_address=plan.side.core.ready_address if self.engine.waits else 0,
            ).run
            plan.take_back[add, scale] = run
        address = out.data_ptr()
        if hot is out:
            run(stream, address, address)
        else:
            run(stream, self._unused[0] if hot is None else hot.data_ptr(), address)
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

    def settle(self) -> None:
        """Waits for all batches launched on the device, and for their deferred experts.

        Raises RuntimeError while a graph is captured, after an earlier error on the CPU, and if the
        CPU does not finish.
        """
        core, backend = self.engine.core, self.backend
        if backend.capturing():
            raise RuntimeError(f"{self.where}: experts cannot move while a CUDA graph is captured")
        backend.synchronize()
        core.raise_error()
        if not core.drain(_SETTLE_SECONDS):
            raise RuntimeError(
                f"{self.where}: batches on {backend.device} did not finish within "
                f"{_SETTLE_SECONDS:g} s"
            )

    def close(self) -> None:
        """Releases the weights; a graph that still calls the layer gets zeros and an error.

        Launched batches that are not handed over yet need the weights, so this waits for them, but
        not for long. It calls no CUDA function, because it may run in any thread at any time.
        """
        core, slots = self.engine.core, list(self._slots.values())
        self._slots.clear()
        self._known = None
        end = time.monotonic() + _CLOSE_SECONDS
        with contextlib.suppress(RuntimeError):  # in a child of a fork
            for slot in slots:
                while core.entries_of(slot.number) < slot.launched and time.monotonic() < end:
                    time.sleep(0.0001)
                core.drop_slot(slot.number, not slot.bank.captured)

    # ---- kernels ----------------------------------------------------------------------------

    def _hand_over(
        self,
        x: torch.dtype,
        ids: torch.dtype,
        weights: torch.dtype,
        padding: torch.dtype | None,
        cold_slot: int | None,
        capturing: bool,
    ) -> Any:
        key = (
            "hand_over",
            x,
            ids,
            weights,
            padding,
            self._hidden,
            self._top_k,
            self._experts,
            cold_slot,
            self._only_cold,
        )
        launch = self.engine.launches.get(key)
        if launch is None:
            int32, int64, float32 = torch.int32, torch.int64, torch.float32
            batch = (x, ids, weights, _PADDING[padding])
            routes = (int32, ids, weights)
            pinned = (x, int32, float32, int32)
            words = (int64, int32, int32, int32, int64, int32)  # times to head
            launch = self._compile(
                key,
                capturing,
                kernels.hand_over,
                (*batch, *routes, *pinned, *words, 0, 0),
                TOP_K=self._top_k,
                EXPERTS=self._experts,
                ENTRIES=self.engine.core.entries,
                PADDED=padding is not None,
                SPLIT=cold_slot is not None,
                ONLY_COLD=self._only_cold,
                COLD_SLOT=cold_slot or 0,
                ROUTES=kernels.routes_with(self._blocks, self._top_k),
                ROOM_CHECK=kernels.ROOM_CHECK,
            )
        return launch

    def _take_back(self, dtype: torch.dtype, add: bool, scale: float, capturing: bool) -> Any:
        key = ("take_back", dtype, self._hidden, add, scale)
        launch = self.engine.launches.get(key)
        if launch is None:
            int32 = torch.int32
            launch = self._compile(
                key,
                capturing,
                kernels.take_back,
                (dtype, torch.int64, int32, int32, dtype, dtype, 0),
                ADD=add,
                SCALE=scale,
            )
        return launch

    def _compile(
        self, key: Any, capturing: bool, function: Any, arguments: Any, **constants: Any
    ) -> Any:
        if capturing:
            raise RuntimeError(
                f"{self.where}: a batch that needs another kernel is captured in a CUDA graph; run "
                "it once before the capture, so that the kernel is compiled"
            )
        launch = self.engine.launches[key] = self.backend.compile(
            function,
            arguments,
            _WARPS,
            HIDDEN=self._hidden,
            BLOCK=self._block,
            FENCE=self.backend.device.type == "cuda",
            TRACE=self.engine.tracer is not None,
            **constants,
        )
        return launch
