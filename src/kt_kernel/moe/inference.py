"""The inference interface: one object per MoE layer, its experts on the CPU."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..runtime.forks import per_process
from ..runtime.streams import on_stream
from ..runtime.tensors import DTYPE_NAMES, DTYPES, is_integer, need_dense, need_tensor, on_cpu
from . import buffers
from .chain import join_chain
from .routing import hot_routes, need_padding, select_deferred_experts, without_padding
from .settings import LayerSettings, placement_of_mask
from .wrapper import BaseMoEWrapper
from .wrong_mode import refuse_calls

if TYPE_CHECKING:
    from ..device.layer import Batch, LayerStream

_UNSYNCED = 4  # submits of one layer that may wait for their sync


@dataclass(slots=True, eq=False)
class _Checked:
    """What is known of a batch that was right, and of every one of the same kinds: checking one
    takes longer than starting it."""

    kinds: Any
    hidden_kind: Any
    like: tuple[int, torch.dtype, torch.device]  # tokens, dtype and device of the hidden states
    stream: LayerStream | None  # None: batches are copied, or on the CPU, or of no tokens


@dataclass(slots=True, eq=False)
class _Pending:
    """A submitted forward whose result was not asked for yet.

    What it needs is either on the CPU, in ``out`` [T, H], once ``call`` is done (None: nothing to
    compute), or comes to the device with ``batch``.
    """

    address: int  # of the hidden states
    like: tuple[int, torch.dtype, torch.device]
    out: torch.Tensor | None = None
    call: buffers.Call | None = None
    batch: Batch | None = None


class InferenceMoEWrapper(BaseMoEWrapper):
    """One MoE layer for inference. Made by ``KTMoEWrapper``.

    Use a wrapper from one thread at a time; wrappers of different models may run in parallel.
    Jobs of wrappers with the same pools run in the order of their submits.
    """

    def __init__(self, settings: LayerSettings) -> None:
        super().__init__(settings)
        s = settings
        self._pending: list[_Pending]
        per_process(self, "_pending", list)
        self._dropped: bool  # whether a result was, since nobody asked for it
        per_process(self, "_dropped", bool)
        self._chain = join_chain(self, s.layer_idx, (s.hidden_size, s.num_experts_per_tok, s.pools))
        self._in_chain: tuple[Any, tuple[int, int]] = (None, (0, 0))  # the chain's order, and in it
        self._checked: _Checked | None = None  # the last one
        self._streams: dict[torch.device, LayerStream] = {}

    select_deferred_experts = staticmethod(select_deferred_experts)

    def submit_forward(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        cuda_stream: Any = None,
    ) -> None:
        """Starts the CPU experts on a batch and returns at once. The inputs are copied.

        Args:
            hidden_states: [..., H], bf16, fp16 or fp32, any device; leading dimensions make up T.
            topk_ids: [T, k] slots, any integer dtype; ids outside 0 … E-1 and slots on the GPU
                are skipped.
            topk_weights: [T, k], any float dtype.
            cuda_stream: the stream on which CUDA tensors are ready, a handle or a torch stream;
                None: the current one.

        On CUDA the batch is handed over by a kernel on that stream, without waiting; it may be
        captured in a graph (by then a batch of that size must have run once). A model uses one
        stream at a time: with another one the device is waited for first.

        Raises:
            RuntimeError: before loading, or an earlier batch failed on the CPU, or what a capture
                needs is not there.
            TypeError, ValueError: wrong types, shapes or dtypes. Nothing was started then.
        """
        self._submit(hidden_states, topk_ids, topk_weights, cuda_stream, copy=True)

    def submit_and_split(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        cuda_stream: Any = None,
        *,
        slot_map: torch.Tensor,
        cold_slot: int,
        padding: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`submit_forward` that also returns the routes of the experts on the GPU.

        They are those of `routing.hot_routes`, with slot_map int32 [E] on the device of
        ``hidden_states``. On CUDA the kernel that hands over the batch writes them.

        padding: rows of the batch that are no tokens, see `routing.need_padding`; nothing is
        computed for them, here or there. In a graph it is read anew at each replay.
        """
        split = slot_map, cold_slot
        routes = self._submit(
            hidden_states, topk_ids, topk_weights, cuda_stream, True, split, padding
        )
        if routes is None:
            with on_stream(topk_ids.device, cuda_stream):
                routes = hot_routes(topk_ids, topk_weights, *split, padding)
        return routes

    def sync_forward(
        self, hidden_states: torch.Tensor | None = None, cuda_stream: Any = None
    ) -> torch.Tensor:
        """Waits for a submitted batch and returns its result [T, H].

        ``hidden_states`` is the tensor given to ``submit_forward``. It says which result is meant
        where several wait (the latest of that tensor); its contents are not read. None: the latest.
        Another tensor of the same shape, dtype and device (a copy) will do only while exactly one
        result waits and none was ever dropped.

        A result that is never asked for is dropped after four more submits, so a pass that ended
        in an error needs no clean-up. On the CPU the result is a fresh tensor; on CUDA a buffer
        (a fixed one for the announced batch sizes), valid until the next-but-one submit of the
        same batch size, dtype and device.

        Raises:
            RuntimeError: without a submit; on CUDA also when an earlier batch failed on the CPU,
                or a later one has the buffers of this one already: of a model two batches may wait
                for their results, one where experts are deferred.
            ValueError: no waiting result is that of ``hidden_states``.
        """
        pending = self._find(hidden_states)
        self._pending.remove(pending)
        if pending.batch is not None:
            return pending.batch.collect(cuda_stream)
        if pending.call is not None:
            pending.call.wait()
        assert pending.out is not None  # without a batch
        tokens, dtype, device = pending.like
        if device.type == "cpu":
            return pending.out
        shape = (tokens, self._settings.hidden_size)
        with on_stream(device, cuda_stream):
            result = buffers.device_result(self._chain.number, shape, dtype, device)
            assert result is not None  # no graph is captured
            result.copy_(pending.out)
        return result

    def sync_and_add(
        self,
        hidden_states: torch.Tensor,
        cuda_stream: Any = None,
        *,
        hot: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """`sync_forward` that adds the sum of the experts on the GPU: scale * (result + hot).

        hot: [T, H], contiguous, in the dtype and on the device of ``hidden_states``; on CUDA it may
        be written over and returned. None: there is none. Returns [T, H] that belongs to the
        caller.
        """
        pending = self._find(hidden_states)
        if pending.batch is not None:
            self._pending.remove(pending)
            return pending.batch.collect_and_add(hot, cuda_stream, scale)
        total = self.sync_forward(hidden_states, cuda_stream)
        with on_stream(pending.like[2], cuda_stream):
            if hot is not None:
                total = hot + total
            elif total.device.type != "cpu":  # a buffer that serves again
                total = total.clone()
            return total if scale == 1.0 else total * scale

    def forward(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        cuda_stream: Any = None,
    ) -> torch.Tensor:
        """``submit_forward`` and ``sync_forward`` in one.

        Returns [T, H] in the dtype of ``hidden_states``.
        """
        self._submit(hidden_states, topk_ids, topk_weights, cuda_stream, copy=False)
        return self.sync_forward(hidden_states, cuda_stream)

    def set_gpu_experts_mask(self, gpu_experts_mask: torch.Tensor) -> None:
        """Changes which slots are on the GPU, where later batches skip them.

        Args:
            gpu_experts_mask: bool [E], True = on the GPU.

        Call it between forward passes. It waits for the batches submitted before, and those of
        CUDA streams with them; they are computed with the mask that they were submitted with.
        Captured graphs use the new one from their next replay on. The weights stay: a slot that
        goes to the GPU can come back, but one whose weights were never loaded on the CPU cannot.

        Raises:
            RuntimeError: before loading, while a CUDA graph is captured, or batches on a device
                do not end.
            TypeError, ValueError: not a mask, or a slot of the CPU's is not loaded there; names
                the slot. Nothing has changed then.
        """
        s = self._settings
        if not self._loaded:
            raise RuntimeError(f"{s.where}: set_gpu_experts_mask before loading")
        placement = placement_of_mask(gpu_experts_mask, s.num_experts)
        for stream in self._streams.values():
            stream.settle()
        try:
            self._core.set_cpu_slots((~placement.mask).tolist())
        except ValueError as error:
            raise ValueError(f"{s.where}: {error}") from None
        self._placement = placement

    # ---- how --------------------------------------------------------------------------------

    def _submit(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        cuda_stream: Any,
        copy: bool,
        split: tuple[torch.Tensor, int] | None = None,
        padding: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the routes that ``split`` asks for where a kernel wrote them, else None."""
        s = self._settings
        if not self._loaded:
            raise RuntimeError(
                f"{s.where}: forward before loading; call load_weights, "
                "load_weights_from_tensors or finish_loading first"
            )
        checked = self._check_inputs(hidden_states, topk_ids, topk_weights)
        like = tokens, dtype, device = checked.like
        if padding is not None:
            need_padding(s.where, padding, tokens, device)
        address = hidden_states.data_ptr()
        if checked.stream is not None:
            batch, routes = checked.stream.submit(
                hidden_states, topk_ids, topk_weights, tokens, cuda_stream, self._chain_place(),
                deferring=s.max_deferred > 0, split=split, padding=padding, kinds=checked.kinds,
            )  # fmt: skip
            self._remember(_Pending(address, like, None, None, batch))
            return routes
        if tokens and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{s.where}: {tokens} tokens on {device}: nothing can be captured in a CUDA graph "
                "there; start the engine without CUDA graphs (eager mode)"
            )
        batch_key = (tokens, device, buffers.generation())
        previous = self._chain.take(self, batch_key)
        _, protected_k = self._chain_place()
        deferring = protected_k < s.num_experts_per_tok
        out = torch.empty((tokens, s.hidden_size), dtype=dtype, device="cpu")
        call = None
        if tokens:
            copy = copy or deferring or device.type != "cpu"
            with on_stream(device, cuda_stream):
                if padding is not None:
                    topk_ids = without_padding(topk_ids, padding)
                x, ids, weights, snapshot = self._inputs(
                    hidden_states, topk_ids, topk_weights, tokens, copy
                )
            try:
                deferred = None
                if deferring:
                    ids, deferred = select_deferred_experts(ids, weights, protected_k)
                call = self._start(x, ids, weights, snapshot, out=out, add=previous)
                if deferred is not None and bool((deferred >= 0).any()):
                    partial = torch.empty(out.shape, dtype=torch.float32, device="cpu")
                    self._start(x, deferred, weights, snapshot, partial=partial)
                    self._chain.offer(self, batch_key, partial)
            finally:
                if snapshot is not None:
                    buffers.release_snapshot(snapshot)
        self._remember(_Pending(address, like, out, call))
        return None

    def _remember(self, pending: _Pending) -> None:
        if self._pending:
            waiting = [
                p for p in self._pending if p.address != pending.address or p.like != pending.like
            ]
            self._dropped |= len(waiting) >= _UNSYNCED
            self._pending = waiting[1 - _UNSYNCED :]
        self._pending.append(pending)

    def _stream_on(self, device: torch.device) -> LayerStream | None:
        """The layer's way to a CUDA device; None where batches are copied, see `engine_of`."""
        stream = self._streams.get(device)
        if stream is None and device.type == "cuda":
            from ..device.engine import engine_of  # not needed without a GPU, as Triton is not

            engine = engine_of(device)
            if engine is None:
                return None
            from ..device.layer import LayerStream

            s = self._settings
            engine.warn_of_threads(sum(s.pools.in_decode))
            stream = self._streams[device] = LayerStream(
                engine, self._core, s.where, self._chain, experts=s.num_experts,
                hidden=s.hidden_size, top_k=s.num_experts_per_tok,
                smallest=max((s.max_tokens, *buffers.get_capture_batch_sizes())),
            )  # fmt: skip
            end = weakref.finalize(self, stream.close)
            end.atexit = False
        return stream

    def _chain_place(self) -> tuple[int, int]:
        """Position in the chain, and how many routes of a token are not deferred."""
        chain = self._chain
        order, place = self._in_chain
        if order is not chain.order:
            order, s = chain.order, self._settings
            deferring = s.max_deferred > 0 and not chain.is_last(self)
            k = s.num_experts_per_tok
            place = chain.position(self), max(k - s.max_deferred, 0) if deferring else k
            self._in_chain = order, place
        return place

    def _start(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        snapshot: buffers.Snapshot | None,
        *,
        out: torch.Tensor | None = None,
        add: torch.Tensor | None = None,
        partial: torch.Tensor | None = None,
    ) -> buffers.Call:
        call = buffers.Call(self._core, x, ids, weights, out, add, partial, snapshot=snapshot)
        call.start(
            self._core.submit,
            x.data_ptr(),
            DTYPES[x.dtype],
            x.shape[0],
            ids.data_ptr(),
            weights.data_ptr(),
            *(0 if tensor is None else tensor.data_ptr() for tensor in (out, add, partial)),
        )
        return call

    def _inputs(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        tokens: int,
        copy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, buffers.Snapshot | None]:
        """x, ids and weights on the CPU as the core wants them; copied, or used where they are."""
        s = self._settings
        h, k = s.hidden_size, s.num_experts_per_tok
        x = hidden_states.detach().reshape(tokens, h)
        ids = topk_ids.detach().reshape(tokens, k)
        weights = topk_weights.detach().reshape(tokens, k)
        if not copy:
            return (
                on_cpu(x), on_cpu(ids, torch.int64), on_cpu(weights, torch.float32), None,
            )  # fmt: skip
        key = (self._chain.number, tokens, h, k, x.dtype, x.device)
        snapshot = buffers.take_snapshot(key, tokens, h, k, x.dtype)
        try:
            snapshot.x.copy_(x)
            snapshot.ids.copy_(ids)
            snapshot.weights.copy_(weights)
        except BaseException:
            buffers.release_snapshot(snapshot)
            raise
        return snapshot.x, snapshot.ids, snapshot.weights, snapshot

    def _find(self, hidden_states: Any) -> _Pending:
        s = self._settings
        if not self._pending:
            lost = "; what was submitted before the process forked is lost in the child"
            raise RuntimeError(
                f"{s.where}: sync_forward without submit_forward"
                + (lost if buffers.generation() else "")
            )
        latest = self._pending[-1]
        if hidden_states is None:
            return latest
        like = self._check_hidden(hidden_states)
        address = hidden_states.data_ptr()
        for pending in reversed(self._pending):
            if pending.address == address and pending.like == like:
                return pending
        alike = any(pending.like == like for pending in self._pending)
        if alike and len(self._pending) == 1 and not self._dropped:
            return latest  # a copy of what was submitted
        if alike:
            raise ValueError(
                f"{s.where}: hidden_states is not one of the {len(self._pending)} tensors whose "
                f"results wait (a result is dropped after {_UNSYNCED} more submits); pass the "
                "tensor that was given to submit_forward, or None for the latest"
            )
        tokens, dtype, device = latest.like
        raise ValueError(
            f"{s.where}: the pending result is [{tokens}, {s.hidden_size}] {dtype} on {device}; "
            f"hidden_states is {list(hidden_states.shape)} {like[1]} on {like[2]}"
        )

    def _check_hidden(self, hidden_states: Any) -> tuple[int, torch.dtype, torch.device]:
        """Returns T, dtype and device."""
        checked = self._checked
        if checked is not None and _kind(hidden_states) == checked.hidden_kind:
            return checked.like
        s = self._settings
        place = f"{s.where}: hidden_states"
        need_tensor(place, hidden_states)
        need_dense(place, hidden_states)
        dtype, shape = hidden_states.dtype, hidden_states.shape
        if dtype not in DTYPES:
            raise ValueError(f"{place} has dtype {dtype}; accepted: {DTYPE_NAMES}")
        if not shape or shape[-1] != s.hidden_size:
            raise ValueError(f"{place} must be [..., {s.hidden_size}], got {list(shape)}")
        return hidden_states.numel() // s.hidden_size, dtype, hidden_states.device

    def _check_inputs(self, hidden_states: Any, topk_ids: Any, topk_weights: Any) -> _Checked:
        """Checks everything that can be wrong with a batch."""
        kinds = _kinds(hidden_states, topk_ids, topk_weights)
        checked = self._checked
        if checked is None or kinds != checked.kinds:
            like = self._check_each(hidden_states, topk_ids, topk_weights)
            stream = self._stream_on(like[2]) if like[0] else None
            checked = self._checked = _Checked(kinds, _kind(hidden_states), like, stream)
        return checked

    def _check_each(
        self, hidden_states: Any, topk_ids: Any, topk_weights: Any
    ) -> tuple[int, torch.dtype, torch.device]:
        s = self._settings
        k = s.num_experts_per_tok
        given = {
            "hidden_states": hidden_states,
            "topk_ids": topk_ids,
            "topk_weights": topk_weights,
        }
        for name, tensor in given.items():
            need_tensor(f"{s.where}: {name}", tensor)
        like = self._check_hidden(hidden_states)
        tokens = like[0]
        for name, tensor in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            need_dense(f"{s.where}: {name}", tensor)
            if tensor.dim() < 1 or tensor.shape[-1] != k or tensor.numel() != tokens * k:
                raise ValueError(
                    f"{s.where}: {name} must be [{tokens}, {k}], got {list(tensor.shape)}"
                )
        if not is_integer(topk_ids):
            raise ValueError(
                f"{s.where}: topk_ids has dtype {topk_ids.dtype}; accepted: integer dtypes"
            )
        if not topk_weights.is_floating_point():
            raise ValueError(
                f"{s.where}: topk_weights has dtype {topk_weights.dtype}; accepted: float dtypes"
            )
        return like


def _kind(tensor: Any) -> Any:
    """All that the checks of a tensor depend on; of one that is not plain, equal to no other's."""
    if type(tensor) is not torch.Tensor or tensor.is_nested:
        return object()
    return tensor.shape, tensor.dtype, tensor.layout, tensor.device


def _kinds(a: Any, b: Any, c: Any) -> Any:
    """The same of three, in half the time."""
    if (
        not type(a) is type(b) is type(c) is torch.Tensor
        or a.is_nested or b.is_nested or c.is_nested
    ):  # fmt: skip
        return object()
    return (
        a.shape, a.dtype, a.layout, a.device, b.shape, b.dtype, b.layout, b.device,
        c.shape, c.dtype, c.layout, c.device,
    )  # fmt: skip


refuse_calls(
    InferenceMoEWrapper,
    "sft",
    {
        "forward_sft": "call forward",
        "submit_forward_sft": "call submit_forward",
        "sync_forward_sft": "call sync_forward",
        "backward": "inference has no backward",
        "init_lora_weights": "inference has no LoRA weights",
        "update_lora_weights": "inference has no LoRA weights",
    },
)
