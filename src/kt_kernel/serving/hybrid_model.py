"""The MoE layers of one model: what they share, and what is logged about them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from ..moe.chain import model_scope
from ..moe.placement import Placement
from ..runtime.text import bracketed, shown_size
from ..weights.loading import LoadRecord
from .adapter import open_adapter
from .cache import ModelCache
from .cache_start import NoCache, describe, start_cache
from .hybrid import HybridLayer
from .model_config import routed_model, size_of
from .moving import refusal
from .names_read_here import NamesReadHere
from .option_table import AUTO, OptionError, find_option
from .options import KTOptions
from .placement import PlacementPlan, initial_placement, plan_placement
from .recording import ModelRecording
from .streaming_start import EngineSide, start_streaming

# What concerns layers by their numbers.
_BY_NUMBER = (
    "weight_path",
    "expert_stats",
    "gpu_experts_mask",
    "expert_lora_path",
    "record_kt_gpu_expert_distribution",
    "record_kt_expert_routes",
)


class HybridModel:
    """The MoE layers of one model: shared state, one log line, and the sum of their counters.

    Keep one per model. Add layers in the order in which they run, which deferral follows. Opens the
    adapter of the options: ValueError if it cannot be read.

    config: the language model's configuration, see `model_config`. None: only options that look at
    each layer by itself are possible. draft: it is the draft model of speculative decoding, with
    the options of `draft.draft_options`. Raises OptionError for options that do not fit it.
    """

    def __init__(self, options: KTOptions, config: Any = None, draft: bool = False) -> None:
        self.options = options
        self.draft = draft
        self.plan: PlacementPlan | None = None
        if config is not None:
            self.plan = plan_placement(options, config)
        self._zero_experts = size_of(config, "zero_expert_num") is not None
        path = options.expert_lora_path
        self._adapter = None if path is None else open_adapter(path)
        self._adapted = "" if self._adapter is None else f"; {self._adapter.describe()}"
        self.recording: ModelRecording | None = None
        self.cache: ModelCache | None = None
        if options.records:
            if config is None:
                raise ValueError("recording needs the model's configuration")
            self.recording = ModelRecording(options, routed_model(config))
        self.layers: list[HybridLayer] = []
        self._scope = model_scope()

    def placement_of(self, layer_idx: int, num_experts: int) -> Placement:
        """The placement at the start of a layer. Raises OptionError if the options do not fit."""
        if self.plan is not None:
            return self.plan.of(layer_idx)
        options, number = self.options, self.options.num_gpu_experts
        if self.draft and number is not None:  # of the served model, which may have more experts
            options = replace(options, num_gpu_experts=min(number, num_experts))
        return initial_placement(options, num_experts, layer_idx)

    def add_layer(self, **shape: Any) -> HybridLayer:
        """Creates the next layer; the keywords are those of HybridLayer. Raises OptionError for a
        second layer of the same number with an option that cannot tell them apart."""
        self._refuse_same_number(shape["layer_idx"])
        change = None if self._adapter is None else self._adapter.layers.get(shape["layer_idx"])
        with self._scope:
            layer = HybridLayer(
                self.options,
                **shape,
                change=change,
                placement=self.placement_of(shape["layer_idx"], shape["num_experts"]),
                zero_experts=self._zero_experts,
            )
        # Other ranks see the same tokens.
        if self.recording is not None and shape.get("has_cpu_part", True):
            layer.record_to(self.recording.add_layer(layer.layer_idx))
        self.layers.append(layer)
        return layer

    def _refuse_same_number(self, number: int) -> None:
        """Ernie 4.5 VL has experts for text and others for images in each layer."""
        given = [find_option(name).flag for name in _BY_NUMBER if getattr(self.options, name)]
        if given and any(layer.layer_idx == number for layer in self.layers):
            raise OptionError(
                f"{given[0]}: layer {number} of the model has several sets of experts, as for text "
                f"and for images, which this option cannot tell apart; remove {given[0]}"
            )

    @property
    def names_read_here(self) -> NamesReadHere:
        """The tensors of the served checkpoint that the engine must not load: those of cold
        experts, if they are read from --kt-weight-path, and of hot ones if these are, too."""
        if self.options.weight_path is None:
            return NamesReadHere({})
        placements = {layer.layer_idx: layer.placement for layer in self.layers}
        if self.options.reads_hot:
            placements = {n: Placement.first(p.num_experts, 0) for n, p in placements.items()}
        return NamesReadHere(placements)

    @property
    def loaded(self) -> bool:
        """Whether all layers added so far are loaded."""
        return bool(self.layers) and all(layer.loaded for layer in self.layers)

    def finish_loading(self) -> None:
        """Ends loading, once all layers are loaded: frees the adapter, and starts the recording.

        Raises ValueError if the adapter is for other layers than the model has.
        """
        if self._adapter is not None:
            self._adapter.check_layers({layer.layer_idx for layer in self.layers})
            self._adapter = None
        if self.recording is not None and self.recording.layers:
            self.recording.start(self)

    def start(self, device: torch.device, dtype: torch.dtype, engine: EngineSide) -> list[str]:
        """Ends loading and prepares streaming and the live cache, once all layers are loaded.

        Returns lines for the log. Raises what `finish_loading`, `start_streaming` and `start_cache`
        raise.
        """
        self.finish_loading()
        lines = self.start_streaming(device, dtype, engine), self.start_cache(device)
        return [line for line in lines if line is not None]

    def start_streaming(
        self, device: torch.device, dtype: torch.dtype, engine: EngineSide
    ) -> str | None:
        """Prepares streaming of long batches, once the model is loaded; see
        `streaming_start.start_streaming`."""
        layers = [layer for layer in self.layers if layer.has_cpu_part]
        return start_streaming(layers, self.options, device, dtype, engine)

    def start_cache(self, device: torch.device) -> str | None:
        """Lets experts move while serving, if the options ask for it. Call it once, when the model
        is loaded and no batch was computed; experts move after `cache.begin`.

        Returns a line for the log. Raises OptionError if it is not possible and not `AUTO`.
        """
        options = self.options
        if not options.moves_experts:
            return None
        try:
            self.cache = start_cache(self.layers, device, options.expert_update_rate)
        except NoCache as why:
            if options.enable_dynamic_expert_update != AUTO:
                raise refusal(why) from why
            for layer in self.layers:
                layer.keep_placement()
            return f"kt: experts do not move while serving: {why}"
        self.cache.start(self)
        return describe(self.cache, options.expert_update_rate)

    @property
    def elsewhere(self) -> bool:
        """Whether another rank computes the cold experts."""
        return any(not (layer.placement.all_hot or layer.has_cpu_part) for layer in self.layers)

    def describe(self) -> str:
        """One line for the log, once loaded: hot and cold experts, memory, method, threads."""
        cold_layers = [layer for layer in self.layers if not layer.placement.all_hot]
        packed = sum(layer.packed_bytes for layer in self.layers)
        where = (
            f"{shown_size(packed)} packed from "
            f"{self.options.weight_path or 'the served checkpoint'}; "
            f"{cold_layers[0].describe_cpu()}"
            if cold_layers
            else "no work for the CPU"
        )
        placements = [layer.placement for layer in self.layers]
        # If the layers differ, `HybridLayer.describe` and the report list their experts.
        hot = {bracketed(p.hot_experts) for p in placements}
        cold = {bracketed(p.cold_experts) for p in placements}
        return (
            f"kt: {'draft model: ' if self.draft else ''}{len(self.layers)} MoE layers, in each "
            f"{_span(p.num_hot for p in placements)} experts hot on the device"
            f"{hot.pop() if len(hot) == 1 else ''} and "
            f"{_span(p.num_cold for p in placements)} cold on the CPU"
            f"{cold.pop() if len(cold) == 1 else ''}{self._selected()}; {where}"
            f"{self._hot_weights()}{self._adapted}"
        )

    def _hot_weights(self) -> str:
        held = [layer.hot for layer in self.layers if layer.hot is not None]
        if not held:
            return ""
        titles = ", ".join(sorted({hot.title for hot in held}))
        return f"; hot experts in {titles}, {shown_size(sum(hot.nbytes for hot in held))}"

    def _selected(self) -> str:
        plan = self.plan
        return f" (selected by {plan.reason})" if plan is not None and plan.layers else ""

    def describe_loading(self) -> list[str]:
        """Time and bytes of loading, once loaded: a line for the model, then one for each layer.
        Empty if there are no cold experts here."""
        layers = [layer for layer in self.layers if layer.has_cpu_part]
        if not layers:
            return []
        total = sum((layer.load_record for layer in layers), LoadRecord())
        # An engine that delivers the weights reads them itself.
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
        return total if self.cache is None else total | self.cache.stats()


def _span(counts: Iterable[int]) -> str:
    low, *_, high = [*sorted(counts)] * 2
    return str(low) if low == high else f"{low} to {high}"
