"""The inference interface: one object per MoE layer, its experts on the CPU."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from ..runtime.streams import on_stream
from ..weights.expert_tensors import MATRICES, matrix_shapes
from . import buffers, cpu_batch
from .batch_checks import BatchChecks, Inputs, Like
from .chain import join_chain
from .routing import hot_routes, need_padding, select_deferred_experts, split_routes
from .settings import LayerSettings, placement_of_mask
from .waiting import StartedBatch, Waiting
from .wrapper import BaseMoEWrapper
from .wrong_mode import refuse_calls

if TYPE_CHECKING:
    from ..device.layer import LayerStream
    from ..device.streaming.experts import PackedExperts
    from .cpu_batch import CpuBatch


class InferenceMoEWrapper(BaseMoEWrapper):
    """One MoE layer for inference. Made by ``KTMoEWrapper``.

    Use a wrapper from one thread at a time; wrappers of different models may run in parallel.
    Jobs of wrappers with the same pools run in the order of their submits.
    """

    def __init__(self, settings: LayerSettings) -> None:
        super().__init__(settings)
        s = settings
        self._batch_checks = BatchChecks(s.where, s.hidden_size, s.num_experts_per_tok)
        self._pending = Waiting(self._batch_checks)
        self._chain = join_chain(self, s.layer_idx, (s.hidden_size, s.num_experts_per_tok, s.pools))
        self._in_chain: tuple[Any, tuple[int, int]] = (None, (0, 0))  # the chain's order, and in it
        self._streams: dict[torch.device, LayerStream] = {}
        # The last result of the checks, and the stream that batches of its kind take (None: they
        # are started from the CPU's memory).
        self._last: tuple[Any, LayerStream | None] = (None, None)
        self._only_cold = False  # see `hand_over_only_cold`
        self._packed: weakref.ref[PackedExperts] | None = None

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
            hidden_states: [..., H], bf16, fp16 or fp32, on any device. The leading dimensions
                multiply to the number of tokens T.
            topk_ids: [T, k] slots, any integer dtype. Ids outside 0 … E-1 and slots on the GPU
                are skipped.
            topk_weights: [T, k], any float dtype.
            cuda_stream: the stream on which CUDA tensors are ready, as a handle or a torch
                stream; None: the current one.

        On CUDA, a kernel on that stream hands over the batch, and the host does not wait. It can
        be captured in a graph if a batch of that size ran before. A model uses one stream at a
        time: a batch on another stream first waits for the device.

        Raises:
            RuntimeError: before loading, if an earlier batch failed on the CPU, or if a capture
                lacks what it needs.
            TypeError, ValueError: wrong types, shapes or dtypes. Nothing was started then.
        """
        self._submit((hidden_states, topk_ids, topk_weights), cuda_stream)

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
        defer: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`submit_forward` that also returns the routes of the experts on the GPU.

        These are the routes of `routing.hot_routes`: slots [T, k] and weights [T, k]. On CUDA the
        kernel that hands over the batch writes them.

        Args:
            slot_map: int32 [E] on the device of ``hidden_states``.
            cold_slot: the slot of a route to an expert that is not on the GPU.
            padding: a mask [T] of rows that are not tokens, see `routing.need_padding`. Neither
                the CPU nor the GPU computes them. A graph reads it anew at each replay.
            defer: False: this batch defers no expert, whatever the layer's setting.
        """
        inputs = hidden_states, topk_ids, topk_weights
        split = slot_map, cold_slot
        routes = self._submit(inputs, cuda_stream, split=split, padding=padding, defer=defer)
        assert routes is not None  # they were asked for
        return routes

    def sync_forward(
        self, hidden_states: torch.Tensor | None = None, cuda_stream: Any = None
    ) -> torch.Tensor:
        """Waits for a submitted batch and returns its result [T, H].

        ``hidden_states`` is the tensor given to ``submit_forward``. It tells which result is meant
        if several wait (the latest of that tensor); its contents are not read. None: the latest.
        Another tensor of the same shape, dtype and device (a copy) is accepted only while exactly
        one result waits and none was ever dropped.

        A result that nobody asks for is dropped after four more submits, so a pass that ended in
        an error needs no clean-up. On the CPU the result is a fresh tensor. On CUDA it is a buffer
        (a fixed one for the announced batch sizes), valid until the next-but-one submit of the
        same batch size, dtype and device.

        Raises:
            RuntimeError: without a submit; on CUDA also if an earlier batch failed on the CPU, or
                a later one has taken the buffers: at most two batches per model may be
                outstanding, or one if experts are deferred.
            ValueError: no waiting result belongs to ``hidden_states``.
        """
        return self._pending.take(hidden_states).collect(cuda_stream)

    def sync_and_add(
        self,
        hidden_states: torch.Tensor,
        cuda_stream: Any = None,
        *,
        hot: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """`sync_forward` that adds the sum of the experts on the GPU: scale * (result + hot).

        hot: [T, H], contiguous, with the dtype and device of ``hidden_states``; on CUDA it may be
        overwritten and returned. None: nothing to add. Returns [T, H], which belongs to the caller.
        """
        return self._pending.take(hidden_states).collect_and_add(hot, cuda_stream, scale)

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
        self._submit((hidden_states, topk_ids, topk_weights), cuda_stream, copy=False)
        return self.sync_forward(hidden_states, cuda_stream)

    def set_gpu_experts_mask(self, gpu_experts_mask: torch.Tensor) -> None:
        """Changes which slots are on the GPU. Later batches skip these.

        Args:
            gpu_experts_mask: bool [E], True = on the GPU.

        Call it between forward passes. It waits for the batches submitted before, and with them
        for those on CUDA streams; they are computed with the mask they were submitted with.
        Captured graphs use the new mask from their next replay on. The weights stay: a slot that
        goes to the GPU can come back, but a slot whose weights were never loaded on the CPU
        cannot.

        Raises:
            RuntimeError: before loading, while a CUDA graph is captured, or if batches on a
                device do not end.
            TypeError, ValueError: not a mask, or it leaves to the CPU a slot that is not loaded
                there; names the slot. Nothing has changed then.
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

    def hand_over_only_cold(self) -> None:
        """From now on, `submit_and_split` gives to the CPU exactly the routes whose slot in
        ``slot_map`` is -1, so that the map alone decides who computes a route. Otherwise the map
        and the experts on the GPU (`set_gpu_experts_mask`) must agree.

        Call it after loading, before any batch is captured in a CUDA graph.
        """
        self._only_cold = True
        for stream in self._streams.values():
            stream.hand_over_only_cold()

    def unpacked(self, slot: int, matrix: str) -> torch.Tensor:
        """The weights of a loaded expert as the kernels use them, float32: "gate" or "up" [I, H],
        or "down" [H, I]. ValueError if they are not on the CPU."""
        s = self._settings
        shape = matrix_shapes(s.hidden_size, s.moe_intermediate_size)[matrix]
        weights = torch.empty(shape, dtype=torch.float32, device="cpu")
        self._core.unpack(slot, MATRICES.index(matrix), weights.numpy())
        return weights

    @property
    def place(self) -> tuple[str, int, int]:
        """(name, position, chain): the layer's name, its place in its model's order, and the
        model's number."""
        return self._settings.where, self._chain_place()[0], self._chain.number

    def packed_experts(self) -> PackedExperts:
        """Where the packed experts lie, to be copied to a GPU. It is one object for all who hold
        it, because memory can be registered with a device only once.

        Raises:
            RuntimeError: before loading.
            ValueError: their weights cannot be unpacked on a GPU (act-order, biases), or the
                experts compute something other than SwiGLU.
        """
        s = self._settings
        known = None if self._packed is None else self._packed()
        if known is not None:
            return known
        if not self._loaded:
            raise RuntimeError(f"{s.where}: packed_experts before loading")
        if not s.activation.is_swiglu:
            raise ValueError(
                f"{s.where}: experts with {s.activation} cannot be streamed to a GPU; accepted: "
                "activation='silu' with a gate and router weights on the output"
            )
        assert self._form is not None  # it is loaded
        from ..device.streaming.experts import PackedExperts  # only needed with a GPU

        try:
            packed = PackedExperts(self._core, self._form, s.hidden_size, s.moe_intermediate_size)
        except ValueError as error:
            raise ValueError(f"{s.where}: {error}") from None
        self._packed = weakref.ref(packed)
        return packed

    # ---- the way of a batch -----------------------------------------------------------------

    def _submit(
        self,
        inputs: Inputs,
        cuda_stream: Any,
        *,
        copy: bool = True,
        split: tuple[torch.Tensor, int] | None = None,
        padding: torch.Tensor | None = None,
        defer: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Checks a batch, starts it on copies of its inputs, and remembers it for its sync.

        copy: False: the caller waits before the inputs can change, so tensors on the CPU may be
        read where they are. split: (slot_map, cold_slot) asks for the routes of the experts on the
        GPU. Returns these, (slots [T, k], weights [T, k]); None without ``split``.
        """
        s = self._settings
        if not self._loaded:
            raise RuntimeError(
                f"{s.where}: forward before loading; call load_weights, "
                "load_weights_from_tensors or finish_loading first"
            )
        x, ids, weights = inputs
        kinds, like = checked = self._batch_checks.batch(x, ids, weights)
        tokens, _, device = like
        if checked is not self._last[0]:  # another kind than before
            self._last = checked, self._stream_on(device) if tokens else None
        stream = self._last[1]
        if padding is not None:
            need_padding(s.where, padding, tokens, device)
        address = x.data_ptr()
        batch: StartedBatch
        routes = None
        if stream is not None:
            batch, routes = stream.submit(
                x,
                ids,
                weights,
                tokens,
                cuda_stream,
                self._chain_place(defer),
                deferring=s.max_deferred > 0,
                split=split,
                padding=padding,
                kinds=kinds,
            )
        else:
            if split is not None and self._only_cold:
                with on_stream(ids.device, cuda_stream):
                    routes, cold = split_routes(ids, weights, *split, padding)
                inputs = x, cold, weights
            place = self._chain_place(defer)
            batch = self._start_on_cpu(like, inputs, cuda_stream, copy, padding, place)
        self._pending.add(address, like, batch)
        if split is not None and routes is None:  # no kernel wrote them
            with on_stream(ids.device, cuda_stream):
                routes = hot_routes(ids, weights, *split, padding)
        return routes

    def _start_on_cpu(
        self,
        like: Like,
        inputs: Inputs,
        cuda_stream: Any,
        copy: bool,
        padding: torch.Tensor | None,
        place: tuple[int, int],
    ) -> CpuBatch:
        """Starts a batch from the CPU's memory.

        Adds what the previous layer of the chain deferred, and offers to the next layer the sum of
        the experts that this one defers.
        """
        tokens, _, device = like
        if tokens and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self._settings.where}: {tokens} tokens on {device}: nothing can be captured in "
                "a CUDA graph there; start the engine without CUDA graphs (eager mode)"
            )
        chain, key = self._chain, (tokens, device, buffers.generation())
        add, (_, protected_k) = chain.take(self, key), place
        batch, deferred = cpu_batch.start(
            self._core, chain.number, like, inputs, cuda_stream, copy, padding, protected_k, add
        )
        if deferred is not None:
            chain.offer(self, key, deferred)
        return batch

    def _stream_on(self, device: torch.device) -> LayerStream | None:
        """The layer's hand-over on a CUDA device; None if batches are copied, see `engine_of`."""
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
                engine,
                self._core,
                s.where,
                self._chain,
                experts=s.num_experts,
                hidden=s.hidden_size,
                top_k=s.num_experts_per_tok,
                smallest=max((s.max_tokens, *buffers.get_capture_batch_sizes())),
            )
            if self._only_cold:
                stream.hand_over_only_cold()
            weakref.finalize(self, stream.close).atexit = False
        return stream

    def _chain_place(self, defer: bool = True) -> tuple[int, int]:
        """Position in the chain, and how many routes of a token are not deferred: all if not
        ``defer``."""
        chain = self._chain
        order, place = self._in_chain
        if order is not chain.order:
            order, s = chain.order, self._settings
            deferring = s.max_deferred > 0 and not chain.is_last(self)
            k = s.num_experts_per_tok
            place = chain.position(self), max(k - s.max_deferred, 0) if deferring else k
            self._in_chain = order, place
        return place if defer else (place[0], self._settings.num_experts_per_tok)


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
