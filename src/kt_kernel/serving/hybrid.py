"""One MoE layer split into hot experts (the engine computes them) and cold experts (the CPU does).

Independent of the engines. A plugin passes options, the weights of the cold experts as they arrive,
and, for each step, hidden states and the router's choice. The layer returns the weighted sum of the
cold experts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..adapter.changes import LayerChange
from ..device.streaming.experts import PackedExperts
from ..experts import KTMoEWrapper
from ..moe.activation import ExpertActivation
from ..moe.inference import InferenceMoEWrapper
from ..moe.placement import Placement
from ..moe.routing import hot_routes, need_padding
from ..runtime.streams import on_stream
from ..runtime.text import bracketed, ranges, shown_size
from ..weights.expert_tensors import matrix_shapes
from ..weights.loading import LoadRecord
from .activations import SILU
from .adapter import FLAG, LayerMerge
from .cache import ModelCache
from .cold_loading import ColdLoading, check_biases
from .hot_weights import HotShape, HotWeights, read_hot
from .option_table import AUTO, OptionError
from .options import KTOptions
from .placement import initial_placement
from .recording import LayerRecording
from .streaming import LayerStreaming, ModelStreaming, StreamedBatch


class _Streamed(NamedTuple):
    """A streamed batch, and its arguments for `HybridLayer._prepare_short_batches`."""

    batch: StreamedBatch
    ids: torch.Tensor
    weights: torch.Tensor
    slot_map: torch.Tensor
    cold_slot: int
    padding: torch.Tensor | None


class HybridLayer:
    """The cold experts of one MoE layer, and its placement.

    Expert ids are the model's own (global). ``placement`` has the experts that are hot at first
    (None: what the options say of a layer by itself), and `set_placement` moves experts later.
    `HybridModel.add_layer` creates the layers of a model, in the order in which they run.

    num_experts_per_tok is k; max_tokens is the largest batch expected (-1: unknown), which only
    sizes buffers. Under tensor parallelism, one rank computes whole cold experts before the ranks'
    outputs are summed. On the other ranks, ``has_cpu_part`` is False: they take no cold weights and
    add nothing. moe_intermediate_size is that of the whole expert. activation: what an expert
    computes. has_bias: the model's experts have biases, which are read with --kt-weight-path only.
    change: what an adapter adds to the experts, hot ones included; it is merged while weights load,
    and ``adapted`` is True. zero_experts: the model has experts that copy their input (LongCat).
    The engines compute these, and pass their routes on with weight 0 to an expert with weights.
    streams: the engine's kernels compute what these experts do, if they are streamed to the GPU.

    Raises OptionError if options do not fit the layer, ValueError if
    `kt_kernel.serving.preflight.prepare` has not selected the method, if biases cannot be read or
    the change does not fit, and what KTMoEWrapper raises.
    """

    def __init__(
        self,
        options: KTOptions,
        *,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        max_tokens: int = -1,
        activation: ExpertActivation = SILU,
        has_bias: bool = False,
        has_cpu_part: bool = True,
        change: LayerChange | None = None,
        placement: Placement | None = None,
        zero_experts: bool = False,
        streams: bool = True,
    ) -> None:
        if options.method == AUTO:
            raise ValueError(
                f"layer {layer_idx}: method {AUTO} is not decided; "
                "call kt_kernel.serving.preflight.prepare first"
            )
        self.options = options
        self.layer_idx = layer_idx
        self._has_bias = has_bias
        self._zero_experts = zero_experts
        self.activation = activation
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self.moe_intermediate_size = moe_intermediate_size
        if placement is None:
            placement = initial_placement(options, num_experts, layer_idx)
        if placement.num_experts != num_experts:
            raise ValueError(
                f"layer {layer_idx} has {num_experts} experts, but the model's configuration says "
                f"{placement.num_experts}"
            )
        self._loaded_placement = self._placement = placement
        self._shapes = matrix_shapes(hidden_size, moe_intermediate_size)
        self._loading: ColdLoading | None = None
        self._finished = False
        self.hot: HotWeights | None = None  # set by a plugin, if kt-moe fills the engine's tensors
        self.adapted = change is not None
        self._merge: LayerMerge | None = None  # while weights load
        if change is not None:
            if not activation.gated:
                raise ValueError(
                    f"layer {layer_idx}: {FLAG}: an adapter cannot be merged into experts without "
                    "a gate; remove it"
                )
            sizes = num_experts, hidden_size, moe_intermediate_size
            self._merge = LayerMerge(f"layer {layer_idx}", change, *sizes)
        if not self._placement.all_hot:
            self._check_features(streams)
        self._slot_maps: dict[torch.device, torch.Tensor] = {}
        self._streaming: LayerStreaming | None = None
        self._streamed: _Streamed | None = None  # the last submit, if it was streamed
        self._prepared: set[Any] = set()
        self._not_counted: dict[str, int] = {}  # what the CPU's counters had at first
        self._recording: LayerRecording | None = None
        self._cache: tuple[ModelCache, int] | None = None  # and the number of this layer in it
        # Set by a plugin: the engine's w13 and w2, and of FP8 in blocks the scales of both.
        self.slot_weights: tuple[torch.Tensor, ...] | None = None
        self._wrapper: InferenceMoEWrapper | None = None
        if has_cpu_part and not self._placement.all_hot:
            self._wrapper = KTMoEWrapper(
                layer_idx=layer_idx,
                num_experts=num_experts,
                num_experts_per_tok=num_experts_per_tok,
                hidden_size=hidden_size,
                moe_intermediate_size=moe_intermediate_size,
                gpu_experts_mask=self._not_on_cpu,
                cpuinfer_threads=options.cpuinfer,
                threadpool_count=options.threadpool_count,
                weight_path=options.weight_path,
                chunked_prefill_size=max_tokens,
                max_deferred_experts_per_token=options.max_deferred_experts_per_token,
                method=options.method,
                activation=activation.function,
                gated=activation.gated,
                apply_router_weight_on_input=activation.router_weight_on_input,
                swiglu_limit=activation.swiglu_limit,
                swiglu_alpha=activation.swiglu_alpha,
                situ_beta=activation.situ_beta,
                situ_linear_beta=activation.situ_linear_beta,
            )
            self._loading = ColdLoading(
                f"layer {layer_idx}", self._wrapper, activation.matrices, self._shapes
            )
            if self._merge is not None:
                self._wrapper.change_weights(self._merge.merged)

    def _check_features(self, streams: bool) -> None:
        """Raises for an activation or biases that the options do not support."""
        place = f"layer {self.layer_idx}"
        if self._has_bias and self.options.weight_path is None:
            raise ValueError(
                f"{place}: biases of experts are read from files only; name the checkpoint with "
                "--kt-weight-path"
            )
        tokens = self.options.given_threshold
        if tokens and not streams:
            raise OptionError(
                f"--kt-gpu-prefill-token-threshold {tokens}: {place}: experts with "
                f"{self.activation} cannot be streamed in this engine; remove it"
            )

    @property
    def placement(self) -> Placement:
        """Which experts are hot, and their slots in the engine's weights: at the start, or since
        the last `set_placement`. See `current_placement` for a live cache."""
        return self._placement

    @property
    def current_placement(self) -> Placement:
        """The placement that batches use now, or a moment ago if experts move while serving."""
        if self._cache is None:
            return self._placement
        cache, number = self._cache
        return cache.layers[number].slots.placement()

    def _cold_experts(self) -> Sequence[int]:
        """The cold experts of `current_placement`, without building a `Placement`."""
        if self._cache is None:
            return self._placement.cold_experts
        cache, number = self._cache
        found: list[int] = (cache.layers[number].slots.wanted < 0).nonzero()[0].tolist()
        return found

    @property
    def keeps_hot(self) -> bool:
        """Whether the CPU has the weights of hot experts, too, so that experts can move."""
        return self.options.moves_experts and not self._placement.all_hot

    @property
    def _not_on_cpu(self) -> torch.Tensor:
        """bool [E], the experts whose weights the CPU does not need."""
        mask = self._placement.mask
        return torch.zeros_like(mask) if self.keeps_hot else mask

    @property
    def takes_weights(self) -> bool:
        """Whether the weights that the CPU needs come through `add_weight`: those of cold experts,
        and those of all experts if the CPU `keeps_hot`. Otherwise they come from the weight path,
        or this rank does not need them."""
        return self._wrapper is not None and self.options.weight_path is None

    @property
    def has_cpu_part(self) -> bool:
        """Whether there are cold experts and this rank computes them."""
        return self._wrapper is not None

    def slot_of(self, expert_id: int) -> int:
        """Slot of a hot expert in the engine's weights, -1 for a cold one."""
        if not 0 <= expert_id < self.num_experts:
            raise ValueError(
                f"layer {self.layer_idx}: expert {expert_id} does not exist; "
                f"accepted: 0 to {self.num_experts - 1}"
            )
        return self._placement.slots[expert_id]

    def set_placement(self, placement: Placement) -> None:
        """Moves experts: batches submitted from now on use this placement.

        Call it between forward passes, once loading is finished. Under tensor parallelism, call it
        on every rank between the same two passes. The engine's weights must already hold each hot
        expert in its slot. The CPU has the weights of the experts that were cold during loading;
        only these may be cold.

        Waits for all earlier batches. The routes of the engine's kernels and the CPU's plan then
        change together, in place, so captured graphs use the new placement from their next replay
        on.

        Raises:
            RuntimeError: loading is not finished, a CUDA graph is captured, or batches on a device
                do not end.
            ValueError: another number of experts or slots, or a cold expert that the CPU does not
                have. Nothing is changed in this case.
        """
        place, old = f"layer {self.layer_idx}", self._placement
        if self._cache is not None:
            raise RuntimeError(f"{place}: set_placement while the live cache moves experts")
        if not self._finished:
            raise RuntimeError(f"{place}: set_placement before loading is finished")
        if (placement.num_experts, placement.num_slots) != (old.num_experts, old.num_slots):
            raise ValueError(
                f"{place}: the placement has {placement.num_experts} experts and "
                f"{placement.num_slots} slots; the layer has {old.num_experts} and {old.num_slots}"
            )
        loaded = self._loaded_placement.cold_experts
        missing = sorted(set(placement.cold_experts) - set(loaded))
        if missing:
            raise ValueError(
                f"{place}: expert {missing[0]} cannot become cold: its weights were not loaded on "
                f"the CPU; loaded there: {ranges(loaded)}"
            )
        if any(device.type == "cuda" for device in self._slot_maps):
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"{place}: experts cannot move while a CUDA graph is captured")
            self._wait_for_devices()
        if self._wrapper is not None:
            self._wrapper.set_gpu_experts_mask(placement.mask)
        self._placement = placement
        with torch.inference_mode():  # the mode in which the engine's batches created the maps
            for slot_map in self._slot_maps.values():
                slot_map.copy_(placement.slot_map())
        self._wait_for_devices()  # before another stream can read the maps

    def _wait_for_devices(self) -> None:
        for device in self._slot_maps:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def hot_weight(
        self, expert_id: int, which: str, tensor: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """A matrix of a hot expert as the engine loads it: whole, with the adapter merged and
        rounded once to ``dtype``; the tensor itself if the layer is not `adapted`.

        Raises ValueError for a wrong shape or dtype.
        """
        if self._merge is None:
            return tensor
        merged = self._merge.merged(expert_id, which, tensor)
        return tensor if merged is tensor else merged.to(dtype)

    def hot_shape(self, rank: int, ranks: int) -> HotShape:
        """The sizes of the hot experts on a rank of tensor parallelism."""
        sizes = self.hidden_size, self.moe_intermediate_size
        return HotShape(self._placement.num_slots, *sizes, rank, ranks)

    def put_hot(self, expert_id: int, which: str, tensor: torch.Tensor) -> None:
        """Takes one matrix of a hot expert whose tensors kt-moe fills (``hot``). An adapter is
        merged in float32, so the weights are rounded only once, like those of cold experts."""
        assert self.hot is not None
        merged = self.hot_weight(expert_id, which, tensor, torch.float32)
        self.hot.put(self.slot_of(expert_id), which, merged)

    def deliver_hot(
        self, expert_id: int, which: str, tensor: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Takes one matrix of a hot expert from an engine's loader, for the CPU as well if it
        `keeps_hot`. Returns what the engine loads, see `hot_weight`; None if kt-moe fills the
        engine's tensors (``hot``)."""
        if self.keeps_hot:
            self.add_weight(expert_id, which, tensor)
        if self.hot is not None:
            self.put_hot(expert_id, which, tensor)
            return None
        return self.hot_weight(expert_id, which, tensor, dtype)

    def add_weight(self, expert_id: int, which: str, tensor: torch.Tensor) -> None:
        """Takes one matrix of a cold expert (copied; any device; bf16, fp16 or fp32).

        which: "gate" or "up" [I, H], or "down" [H, I]. See `ColdLoading.add`. Does nothing if
        `takes_weights` is False.
        Raises ValueError for a hot expert, a second delivery, or a wrong shape or dtype, and
        RuntimeError once loading is finished, see `refuse_reload`.
        """
        place = f"layer {self.layer_idx}, expert {expert_id}, {which}"
        names = self.activation.matrices
        if which not in names:
            raise ValueError(f"{place}: no such matrix; accepted: {', '.join(names)}")
        if self.slot_of(expert_id) >= 0 and not self.keeps_hot:
            raise ValueError(
                f"{place}: the weights of hot experts belong to the engine; cold experts: "
                f"{ranges(self._placement.cold_experts)}"
            )
        self.refuse_reload(place)
        if self._loading is None or not self.takes_weights:
            return
        self._loading.add(expert_id, which, tensor)

    def refuse_reload(self, place: str) -> None:
        """RuntimeError if loading is finished and some experts are cold, adapted or converted: an
        engine that replaces weights while serving would not change them, or would lose the adapter.
        The message begins with ``place``."""
        fixed = self.adapted or self.hot is not None or not self._placement.all_hot
        if self._finished and fixed:
            raise RuntimeError(
                f"{place}: weights arrive after loading was finished; "
                "replacing weights while serving is not supported"
            )

    def finish_loading(self) -> None:
        """Finishes loading: reads --kt-weight-path if given, else checks that all cold weights
        arrived. The same for hot experts whose tensors kt-moe fills (``hot``).

        Raises ValueError naming missing matrices. A second call does nothing.
        """
        if self._finished:
            return
        if self.hot is not None:
            if self.options.reads_hot:
                change = None if self._merge is None else self._merge.merged
                read_hot(self.options, self.layer_idx, self._placement, self.hot, change)
            self.hot.check_complete(self._placement)
        if self._merge is not None:
            self._merge.check_complete(self._placement.hot_experts)
        if self._wrapper is not None:
            self._finish_cold(self._wrapper)
        self._merge = None
        self._finished = True

    def _finish_cold(self, wrapper: InferenceMoEWrapper) -> None:
        if self.options.weight_path is not None:
            inter, hidden = self._shapes["gate"]
            sizes = self.num_experts, hidden, inter
            check_biases(self.options, self.layer_idx, sizes, self._has_bias)
            wrapper.load_weights(torch.arange(self.num_experts, device="cpu"))
        else:
            assert self._loading is not None
            on_gpu = self._not_on_cpu.tolist()
            self._loading.check_complete([e for e, there in enumerate(on_gpu) if not there])
            wrapper.finish_loading()

    @property
    def wrapper(self) -> InferenceMoEWrapper:
        """The layer on the CPU. RuntimeError if there is none on this rank."""
        if self._wrapper is None:
            raise RuntimeError(f"layer {self.layer_idx}: no cold experts on this rank")
        return self._wrapper

    def start_streaming(self, model: ModelStreaming, packed: PackedExperts) -> None:
        """Batches from the threshold on are streamed from now on. packed: this layer's experts,
        registered with the device."""
        self._streaming = LayerStreaming(model, self.wrapper, packed, self.activation)

    def start_cache(self, cache: ModelCache, number: int, device: torch.device) -> None:
        """Experts move from now on. number: of this layer in the cache. Call it before the first
        batch."""
        self._cache = cache, number
        self._slot_maps[device] = cache.live_map(number)
        self.wrapper.hand_over_only_cold()

    def keep_placement(self) -> None:
        """Experts do not move after all: the CPU computes the cold ones, although it has all."""
        if self._wrapper is not None and self.keeps_hot:
            self._wrapper.set_gpu_experts_mask(self._placement.mask)

    def submit(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        stream: Any = None,
        *,
        cold_slot: int = 0,
        padding: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Starts the cold experts on x [T, H]; ids and router weights are [T, k]. Returns at once.

        Ids are global. Ids of hot experts, negative ids and ids of experts that do not exist are
        skipped. Returns the routes for the engine's kernel of hot experts: slots [T, k] and weights
        [T, k], in the dtypes of the arguments. A route to a cold expert, or to none, gets slot
        ``cold_slot`` and weight 0. stream: a stream of the device, None for the current one;
        nothing waits on the host. padding: mask of rows that are not tokens and have no routes, see
        `routing.need_padding`.
        """
        self._need_cold("submit")
        topk_ids = self.record(topk_ids, topk_weights, padding, stream)
        if self._cache is not None:
            cache, number = self._cache
            cache.begin_pass(number, topk_ids, padding, stream)
        slot_map = self._slot_maps.get(x.device)
        if slot_map is None:
            slot_map = self._slot_maps[x.device] = self._placement.slot_map(x.device)
        self._streamed = None
        if self._streaming is not None and stream is None and self._streaming.wants(x):
            batch = self._streaming.start(
                x,
                topk_ids,
                topk_weights,
                cold=self._cold_experts(),
                slot_map=slot_map,
                cold_slot=cold_slot,
                padding=padding,
                live=self._cache is not None,
            )
            self._streamed = _Streamed(batch, topk_ids, topk_weights, slot_map, cold_slot, padding)
            return batch.routes
        if self._wrapper is None:
            if padding is not None:
                need_padding(f"layer {self.layer_idx}", padding, x.shape[0], x.device)
            return hot_routes(topk_ids, topk_weights, slot_map, cold_slot, padding)
        return self._wrapper.submit_and_split(
            x,
            topk_ids,
            topk_weights,
            stream,
            slot_map=slot_map,
            cold_slot=cold_slot,
            padding=padding,
        )

    def record_to(self, recording: LayerRecording) -> None:
        """Batches are recorded from now on: by `submit`, or by `record` if all experts are hot."""
        self._recording = recording

    @property
    def recorded(self) -> bool:
        """Whether batches are recorded on this rank."""
        return self._recording is not None

    def record(
        self,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        padding: torch.Tensor | None = None,
        stream: Any = None,
    ) -> torch.Tensor:
        """Records the routes [T, k] of a batch, if `recorded`. The arguments are those of `submit`.

        Returns the ids without routes to zero experts, which the engines give weight 0 and the id
        of another expert.
        """
        if self._zero_experts:
            with on_stream(topk_ids.device, stream):
                topk_ids = topk_ids.masked_fill(topk_weights == 0, self.num_experts)
        if self._recording is not None:
            self._recording.add(topk_ids, padding, stream)
        return topk_ids

    def collect(
        self,
        x: torch.Tensor,
        hot: torch.Tensor | None = None,
        stream: Any = None,
        *,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """scale * (sum of the cold experts + hot) [T, H] in x's dtype, for the last `submit`.

        hot: the engine's sum [T, H], which may be overwritten; None if the engine has no slot.
        """
        self._need_cold("collect")
        on_cpu = self._wrapper is not None
        streamed, self._streamed = self._streamed, None
        if streamed is not None:
            self._prepare_short_batches(streamed, x, hot, scale)
            hot, on_cpu = streamed.batch.add(x, hot), streamed.batch.on_cpu
        if self._wrapper is not None and on_cpu:
            return self._wrapper.sync_and_add(x, stream, hot=hot, scale=scale)
        if hot is None:
            return torch.zeros_like(x)
        return hot if scale == 1.0 else hot * scale

    def _prepare_short_batches(
        self, streamed: _Streamed, x: torch.Tensor, hot: torch.Tensor | None, scale: float
    ) -> None:
        """Computes a token without routes like a batch that is not streamed, once for each kind of
        batch. An engine that runs long batches only before it captures short ones in a CUDA graph
        would otherwise have no kernels for them."""
        assert self._wrapper is not None
        _, ids, weights, slot_map, cold_slot, padding = streamed
        kind = (
            *(each if each is None else each.dtype for each in (x, ids, weights, padding, hot)),
            cold_slot,
            scale,
        )
        if kind in self._prepared:
            return
        self._prepared.add(kind)
        one = x[:1].clone()
        none = -1 if ids.dtype.is_signed else min(self.num_experts, torch.iinfo(ids.dtype).max)
        self._wrapper.submit_and_split(
            one,
            torch.full_like(ids[:1], none),
            weights[:1].clone(),
            slot_map=slot_map,
            cold_slot=cold_slot,
            padding=None if padding is None else padding[:1],
            defer=False,
        )
        hot = None if hot is None else torch.zeros_like(hot[:1])
        self._wrapper.sync_and_add(one, None, hot=hot, scale=scale)

    def stats(self) -> dict[str, int]:
        """Counters so far: of the CPU kernels forwards, tokens, expert_calls and others, and those
        of `StreamCounters` if batches are streamed. Empty without cold experts, or before their
        weights arrive."""
        counters = self._wrapper.stats() if self._wrapper is not None else {}
        for name, count in self._not_counted.items():
            counters[name] -= count
        if self._streaming is not None:
            counters |= vars(self._streaming.counters)
        return counters

    def forget_counters(self) -> None:
        """The CPU's counters begin at 0 again."""
        self._not_counted = self._wrapper.stats() if self._wrapper is not None else {}

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed weights held for the cold experts."""
        return self._wrapper.packed_bytes if self._wrapper is not None else 0

    @property
    def load_record(self) -> LoadRecord:
        """Time and bytes of loading the cold experts."""
        return self._wrapper.load_record if self._wrapper is not None else LoadRecord()

    def describe(self) -> str:
        """One line: the placement, the format and the packed size."""
        p = self._placement
        return (
            f"layer {self.layer_idx}: {p.num_hot} hot experts{bracketed(p.hot_experts)} on "
            f"the device, {p.num_cold} cold on the CPU, {self.options.method}, "
            f"{shown_size(self.packed_bytes)} packed"
        )

    def describe_cpu(self) -> str:
        """One line: method, kernels and threads of the CPU part."""
        self._need_cold("describe_cpu")
        return "computed by another rank" if self._wrapper is None else self._wrapper.describe()

    @property
    def loaded(self) -> bool:
        """Whether `finish_loading` succeeded."""
        return self._finished

    def _need_cold(self, call: str) -> None:
        if self._placement.all_hot:
            raise RuntimeError(
                f"layer {self.layer_idx}: {call} needs cold experts; all {self.num_experts} are hot"
            )
