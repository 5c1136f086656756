"""One MoE layer split into hot experts (the engine computes them) and cold experts (the CPU does).

Knows no engine: a plugin gives it options, the cold experts' weights as they arrive, and per step
the hidden states with the router's choice; it returns the cold experts' weighted sum.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..experts import KTMoEWrapper
from ..moe.chain import model_scope
from ..moe.inference import InferenceMoEWrapper
from ..moe.placement import Placement, initial_placement
from ..moe.routing import hot_routes, need_padding
from ..runtime.forks import per_process
from ..runtime.text import ranges
from ..weights.expert_tensors import MATRICES, matrix_shapes
from ..weights.loading import LoadRecord
from .options import AUTO, KTOptions

WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class HybridLayer:
    """The cold half of one MoE layer, and the bookkeeping of which experts are hot.

    Expert ids are the model's own (global). `placement.initial_placement` says which are hot at
    first, and `set_placement` moves them later. Layers of one model are made by
    `HybridModel.add_layer`, in the order in which they run.

    num_experts_per_tok is k, max_tokens the largest batch expected (-1: not known; it only sizes
    buffers). Under tensor parallelism one rank computes the cold experts, whole, before the ranks'
    outputs are summed; on the others ``has_cpu_part`` is False: they take no cold weights, and add
    nothing. moe_intermediate_size is that of the whole expert. Raises OptionError for options that
    do not fit, ValueError for a method that `kt_kernel.serving.preflight.prepare` has not decided,
    and what KTMoEWrapper raises.
    """

    _lock: threading.Lock

    def __init__(
        self,
        options: KTOptions,
        *,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        activation: str = "silu",
        max_tokens: int = -1,
        swiglu_limit: float = 0.0,
        swiglu_alpha: float = 0.0,
        has_cpu_part: bool = True,
    ) -> None:
        if activation != "silu":
            raise ValueError(
                f"layer {layer_idx}: activation {activation!r} is not supported on the CPU; "
                "supported: 'silu'"
            )
        if options.method == AUTO:
            raise ValueError(
                f"layer {layer_idx}: method {AUTO} is not decided; "
                "kt_kernel.serving.preflight.prepare decides it"
            )
        self.options = options
        self.layer_idx = layer_idx
        self.num_experts = num_experts
        self.hidden_size = hidden_size
        self._loaded_placement = self._placement = initial_placement(options, num_experts)
        self._shapes = matrix_shapes(hidden_size, moe_intermediate_size)
        self._arrived: dict[int, dict[str, torch.Tensor]] = {}
        self._packed: set[int] = set()
        per_process(self, "_lock", threading.Lock)  # engines may load shards from several threads
        self._finished = False
        self._slot_maps: dict[torch.device, torch.Tensor] = {}
        self._wrapper: InferenceMoEWrapper | None = None
        if has_cpu_part and not self._placement.all_hot:
            self._wrapper = KTMoEWrapper(
                layer_idx=layer_idx,
                num_experts=num_experts,
                num_experts_per_tok=num_experts_per_tok,
                hidden_size=hidden_size,
                moe_intermediate_size=moe_intermediate_size,
                gpu_experts_mask=self._placement.mask,
                cpuinfer_threads=options.cpuinfer,
                threadpool_count=options.threadpool_count,
                weight_path=options.weight_path,
                chunked_prefill_size=max_tokens,
                max_deferred_experts_per_token=options.max_deferred_experts_per_token,
                method=options.method,
                swiglu_limit=swiglu_limit,
                swiglu_alpha=swiglu_alpha,
            )

    @property
    def placement(self) -> Placement:
        """Which experts are hot now, and in which slots of the engine's weights."""
        return self._placement

    @property
    def takes_weights(self) -> bool:
        """Whether cold weights come through `add_weight` (else from the weight path, or this rank
        has no use for them)."""
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
                f"0 to {self.num_experts - 1} is accepted"
            )
        return self._placement.slots[expert_id]

    def set_placement(self, placement: Placement) -> None:
        """Moves experts: batches submitted from now on go by this placement.

        Call it between forward passes, once loading is finished; under tensor parallelism on every
        rank between the same two passes. The engine's weights must hold each hot expert in its slot
        by then. The CPU has the weights of the experts that were cold when they were loaded: only
        these may be cold.

        It waits for all batches submitted before. The routes of the engine's kernels and the CPU's
        plan then change together, in place: a captured graph follows from its next replay on.

        Raises:
            RuntimeError: loading is not finished, a CUDA graph is captured, or batches on a device
                do not end.
            ValueError: another number of experts or slots, or a cold expert that the CPU does not
                have. Nothing has changed then.
        """
        place, old = f"layer {self.layer_idx}", self._placement
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
        with torch.inference_mode():  # in which engines' batches made the maps
            for slot_map in self._slot_maps.values():
                slot_map.copy_(placement.slot_map())
        self._wait_for_devices()  # before another stream reads the maps

    def _wait_for_devices(self) -> None:
        for device in self._slot_maps:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def add_weight(self, expert_id: int, which: str, tensor: torch.Tensor) -> None:
        """Takes one matrix of a cold expert (copied; any device; bf16, fp16 or fp32).

        which: "gate" or "up" [I, H], or "down" [H, I]. The expert is packed, and the copies freed,
        when its third matrix arrives. Does nothing where `takes_weights` is False.
        ValueError for a hot expert, a second delivery, or a wrong shape or dtype. RuntimeError once
        loading is finished, see `refuse_reload`.
        """
        place = f"layer {self.layer_idx}, expert {expert_id}, {which}"
        if which not in MATRICES:
            raise ValueError(f"{place}: unknown matrix; accepted: {', '.join(MATRICES)}")
        if self.slot_of(expert_id) >= 0:
            raise ValueError(
                f"{place}: a hot expert's weights belong to the engine; cold: "
                f"{ranges(self._placement.cold_experts)}"
            )
        self.refuse_reload(place)
        if self._wrapper is None or not self.takes_weights:
            return
        if tuple(tensor.shape) != self._shapes[which]:
            raise ValueError(
                f"{place}: shape {tuple(tensor.shape)}, expected {self._shapes[which]}"
            )
        if tensor.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{place}: dtype {tensor.dtype}; accepted: "
                + ", ".join(str(dtype) for dtype in WEIGHT_DTYPES)
            )
        # device="cpu" spelled out: engines build and load models under a device context.
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        copy.copy_(tensor.detach())
        with self._lock:
            self.refuse_reload(place)
            matrices = self._arrived.setdefault(expert_id, {})
            if which in matrices or expert_id in self._packed:
                raise ValueError(f"{place}: arrived twice")
            matrices[which] = copy
            if len(matrices) == len(MATRICES):
                # First: where packing fails, or a child is forked meanwhile, all three must come
                # again.
                del self._arrived[expert_id]
                self._wrapper.load_expert(expert_id, *(matrices[name] for name in MATRICES))
                self._packed.add(expert_id)

    def refuse_reload(self, place: str) -> None:
        """RuntimeError when loading is finished and some experts are cold: an engine that exchanges
        weights while serving would leave them as they were. ``place`` begins the message."""
        if self._finished and not self._placement.all_hot:
            raise RuntimeError(
                f"{place}: weights arrive after loading was finished; "
                "exchanging weights while serving is not supported"
            )

    def finish_loading(self) -> None:
        """Ends loading: reads --kt-weight-path if given, else checks that all cold weights arrived.

        ValueError names the matrices that are missing. A second call does nothing.
        """
        if self._finished or self._wrapper is None:
            self._finished = True
            return
        if self.options.weight_path is not None:
            self._wrapper.load_weights(torch.arange(self.num_experts, device="cpu"))
        else:
            missing = [
                f"{expert} ({', '.join(m for m in MATRICES if m not in there)})"
                for expert in self._placement.cold_experts
                if expert not in self._packed
                for there in (self._arrived.get(expert, {}),)
            ]
            if missing:
                raise ValueError(
                    f"layer {self.layer_idx}: weights of cold experts did not arrive: "
                    + "; ".join(missing[:8])
                    + (f"; and {len(missing) - 8} more experts" if len(missing) > 8 else "")
                )
            self._wrapper.finish_loading()
        self._finished = True

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

        Ids are global; those of hot experts, negative ones and ones that do not exist are skipped.
        Returns the router's choice as the engine's hot kernel needs it, slots [T, k] and weights
        [T, k], dtypes kept: a route to a cold expert, or to none, gets slot ``cold_slot`` and
        weight 0. stream: of the device, None for the current one; nothing waits on the host.
        padding: rows that are no tokens, whose routes are to none, see `routing.need_padding`.
        """
        self._need_cold("submit")
        slot_map = self._slot_maps.get(x.device)
        if slot_map is None:
            slot_map = self._slot_maps[x.device] = self._placement.slot_map(x.device)
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

    def collect(
        self,
        x: torch.Tensor,
        hot: torch.Tensor | None = None,
        stream: Any = None,
        *,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """scale * (the cold experts' sum + hot) [T, H] in x's dtype, for the last `submit`.

        hot: the engine's sum [T, H], which may be written over; None where the engine has no slot.
        """
        self._need_cold("collect")
        if self._wrapper is not None:
            return self._wrapper.sync_and_add(x, stream, hot=hot, scale=scale)
        if hot is None:
            return torch.zeros_like(x)
        return hot if scale == 1.0 else hot * scale

    def stats(self) -> dict[str, int]:
        """Counters of the CPU kernels so far: forwards, tokens, expert_calls and others; {} without
        cold experts or before their weights arrive."""
        return self._wrapper.stats() if self._wrapper is not None else {}

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed weights held for the cold experts."""
        return self._wrapper.packed_bytes if self._wrapper is not None else 0

    @property
    def load_record(self) -> LoadRecord:
        """What loading the cold experts took."""
        return self._wrapper.load_record if self._wrapper is not None else LoadRecord()

    def describe(self) -> str:
        """One line: which experts are where, in what format, how many megabytes."""
        p = self._placement
        return (
            f"layer {self.layer_idx}: {p.num_hot} hot experts{_bracketed(p.hot_experts)} on "
            f"the device, {p.num_cold} cold on the CPU, {self.options.method}, "
            f"{self.packed_bytes / 1e6:.1f} MB packed"
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


class HybridModel:
    """The MoE layers of one model: what they share, one log line, and their counters summed.

    Keep one per model; layers are added in the order in which they run, which is the order deferral
    follows.
    """

    def __init__(self, options: KTOptions) -> None:
        self.options = options
        self.layers: list[HybridLayer] = []
        self._scope = model_scope()

    def add_layer(self, **shape: Any) -> HybridLayer:
        """Constructs the next layer; the keywords are those of HybridLayer."""
        with self._scope:
            layer = HybridLayer(self.options, **shape)
        self.layers.append(layer)
        return layer

    @property
    def loaded(self) -> bool:
        """Whether all layers added so far are loaded."""
        return bool(self.layers) and all(layer.loaded for layer in self.layers)

    @property
    def elsewhere(self) -> bool:
        """Whether another rank computes the cold experts."""
        return any(not (layer.placement.all_hot or layer.has_cpu_part) for layer in self.layers)

    def describe(self) -> str:
        """One line for the log, once loaded: hot and cold experts, memory, method, threads."""
        first = self.layers[0]
        packed = sum(layer.packed_bytes for layer in self.layers) / 1e6
        where = (
            f"{packed:.1f} MB packed from {self.options.weight_path or 'the served checkpoint'}; "
            f"{first.describe_cpu()}"
            if not first.placement.all_hot
            else "nothing to do for the CPU"
        )
        placements = [layer.placement for layer in self.layers]
        # Where the layers differ, their experts are told by `HybridLayer.describe` and the report.
        hot = {_bracketed(p.hot_experts) for p in placements}
        cold = {_bracketed(p.cold_experts) for p in placements}
        return (
            f"kt: {len(self.layers)} MoE layers, in each "
            f"{_span(p.num_hot for p in placements)} experts hot on the device"
            f"{hot.pop() if len(hot) == 1 else ''} and "
            f"{_span(p.num_cold for p in placements)} cold on the CPU"
            f"{cold.pop() if len(cold) == 1 else ''}; {where}"
        )

    def describe_loading(self) -> list[str]:
        """What loading took, once loaded: a line for the model, then one for each layer; none
        without cold experts here."""
        layers = [layer for layer in self.layers if layer.has_cpu_part]
        if not layers:
            return []
        total = sum((layer.load_record for layer in layers), LoadRecord())
        # An engine that delivers the weights reads them by itself.
        part = " of packing" if layers[0].takes_weights else ""
        return [
            f"kt: {len(layers)} MoE layers loaded: {total.describe(part)}",
            *(f"kt: layer {x.layer_idx} loaded: {x.load_record.describe(part)}" for x in layers),
        ]

    def stats(self) -> dict[str, int]:
        """Counters of all layers, summed."""
        total: dict[str, int] = {}
        for layer in self.layers:
            for name, value in layer.stats().items():
                total[name] = total.get(name, 0) + value
        return total


def _bracketed(ids: Sequence[int]) -> str:
    return f" [{ranges(ids)}]" if ids else ""


def _span(counts: Iterable[int]) -> str:
    low, *_, high = [*sorted(counts)] * 2
    return str(low) if low == high else f"{low} to {high}"
