"""vLLM plugin: the MoE layer with cold experts on the CPU. Imported only inside vLLM."""

from itertools import chain
from typing import Any

import torch

# The package before routed_experts, because vLLM's modules have circular imports.
import vllm.model_executor.layers.fused_moe  # noqa: F401
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.models import gpt_oss
from vllm.model_executor.models.utils import extract_layer_index

from kt_kernel.serving.activations import GPT_OSS, activation_of
from kt_kernel.serving.draft import draft_options
from kt_kernel.serving.hot_delivery import HotDelivery
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.serving.hybrid_model import HybridModel
from kt_kernel.serving.option_table import PACKED
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.report import watch
from kt_kernel.serving.streaming_start import EngineSide

from ..common import (
    MATRIX,
    instead_of_converting,
    loaded_parameters,
    parameter_name,
    slot_weights,
)
from ..contract import Arguments
from .cold import NoHotExperts
from .expert_contract import EXPERT_ARGUMENTS, EXPERT_CONFIG, EXPERT_RANKS
from .hot import ColdAsLast, PackedHotMethod, hold_dense
from .options import logger, options_of
from .padding import Padding
from .routes import (
    SkipColdRoutes,
    interleaves,
    products,
    repeat_hot_routes,
    skip_cold_routes,
)

_STEP_LIMIT = 7.0  # of vLLM's kernel for Step-3.5, which models do not give


class HybridExperts(RoutedExperts):
    """RoutedExperts with the hot experts in vLLM's kernels and the cold ones in ours.

    Built only for models with kt options, see slot.py. With all experts hot and no adapter, it
    behaves like RoutedExperts.
    """

    def __init__(
        self,
        layer_name: str,
        params_dtype: torch.dtype,
        moe_config: Any,
        quant_config: Any,
        **kwargs: Any,
    ) -> None:
        config = get_current_vllm_config()
        options = options_of(config)
        assert options is not None
        _refuse(layer_name, moe_config, kwargs)
        self.kt_model = _model_of(config, options)
        # A draft model computes its padding like tokens: it has few, and graphs of its own.
        self.kt_padding = None if self.kt_model.draft else Padding(config)
        self.kt_skip: SkipColdRoutes | ColdAsLast | None = None
        self.kt_on_input = kwargs.get("apply_router_weight_on_input", False)
        self.kt_computes = _computes(f"kt: {layer_name}", moe_config, self.kt_on_input)
        ranks = moe_config.moe_parallel_config
        # The sizes in moe_config, before vLLM pads them for its kernels.
        self.kt_layer: HybridLayer = self.kt_model.add_layer(
            layer_idx=extract_layer_index(layer_name),
            num_experts=moe_config.num_experts,
            num_experts_per_tok=moe_config.experts_per_token,
            hidden_size=moe_config.hidden_dim,
            moe_intermediate_size=moe_config.intermediate_size_per_partition * ranks.tp_size,
            **self.kt_computes,
            streams=interleaves(self.kt_computes["activation"]) is not None,
            max_tokens=moe_config.max_num_tokens,
            has_cpu_part=ranks.tp_rank == 0,
        )
        matrices = self.kt_layer.activation.matrices
        self.kt_delivery = HotDelivery(f"layer {self.kt_layer.layer_idx}", "vLLM", matrices)
        # The number of experts that vLLM allocates.
        moe_config.num_local_experts = self.kt_layer.placement.num_slots
        super().__init__(layer_name, params_dtype, moe_config, quant_config, **kwargs)
        self._check_method()
        self._hook_end_of_loading(params_dtype, _engine_side(config))

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        """The method that holds and computes the hot experts: vLLM's choice, unless kt-moe fills in
        their weights."""
        layer = self.kt_layer
        if layer.placement.num_slots == 0 and layer.options.weight_path is not None:
            return NoHotExperts(moe_config)
        some_hot = layer.placement.num_slots > 0
        if some_hot and layer.options.converts_hot and not layer.activation.gated:
            raise ValueError(
                f"kt: {prefix}: kt-moe converts the weights of hot experts in vLLM only if they "
                f"have a gate; accepted: {instead_of_converting(layer.options)}"
            )
        if some_hot and layer.options.hot_format == PACKED:
            return PackedHotMethod(moe_config, layer, self.kt_computes)
        if layer.options.reads_hot:
            return UnquantizedFusedMoEMethod(moe_config)
        return super()._get_quant_method(prefix, quant_config, moe_config)

    def _check_method(self) -> None:
        layer = self.kt_layer
        tensors = [*self.parameters(), *self.buffers()]
        if tensors and not tensors[0].is_cuda and not layer.placement.all_hot:
            _refuse_on_cpu(f"kt: {self.layer_name}", layer)
        unchanged = layer.placement.all_hot and not layer.adapted and not layer.recorded
        if unchanged or isinstance(self.quant_method, (NoHotExperts, PackedHotMethod)):
            return
        if not isinstance(self.quant_method, (UnquantizedFusedMoEMethod, Fp8MoEMethod)):
            raise ValueError(
                f"kt: {self.layer_name}: hot experts by {type(self.quant_method).__name__} are not "
                "supported; accepted: --kt-hot-format bf16 or packed"
            )
        if self.quant_method.is_monolithic:
            raise ValueError(
                f"kt: {self.layer_name}: the selected MoE backend routes inside its kernel, "
                "which kt-moe does not support; add --moe-backend triton"
            )
        if self.hidden_size != self.kt_layer.hidden_size:
            raise ValueError(
                f"kt: {self.layer_name}: the selected MoE backend pads the hidden size "
                f"{self.kt_layer.hidden_size} to {self.hidden_size}, which kt-moe does not "
                "support; add --moe-backend triton"
            )

    def _hook_end_of_loading(self, dtype: torch.dtype, engine: EngineSide) -> None:
        after_loading = self.quant_method.process_weights_after_loading

        def finish(layer: Any) -> None:
            # Models change moe_config after their layers are built.
            place = f"kt: {self.layer_name}"
            _check(EXPERT_CONFIG, self.moe_config, place)
            if _computes(place, self.moe_config, self.kt_on_input) != self.kt_computes:
                raise ValueError(
                    f"{place}: the model changes the experts' activation or biases after the layer "
                    "is built, which is not supported with kt options"
                )
            placement = self.kt_layer.placement
            if placement.num_slots and self.kt_layer.options.reads_hot and not self.kt_layer.hot:
                hold_dense(self)
            if self.kt_layer.hot is None:
                self.kt_delivery.check_complete(loaded_parameters(self), placement.hot_experts)
            self.kt_layer.finish_loading()
            if placement.num_slots:  # vLLM cannot repack an empty weight
                after_loading(layer)
                if not placement.all_hot:
                    self.kt_skip = self._skipping(placement.num_slots)
                    self.kt_layer.slot_weights = slot_weights(self)
            if self.kt_model.loaded:
                device = next(chain(self.parameters(), self.buffers())).device
                for line in self.kt_model.start(device, dtype, engine):
                    logger.info(line)
                watch(self.kt_model, logger)

        self.quant_method.process_weights_after_loading = finish
        if not self.kt_layer.placement.num_slots:
            # vLLM 0.26 calls it under tensor parallelism if loading created no kernel.
            self.quant_method.maybe_make_prepare_finalize = lambda **given: None

    def _skipping(self, slots: int) -> "SkipColdRoutes | ColdAsLast | None":
        """How the method's kernel skips cold routes; None if it computes every route."""
        if isinstance(self.quant_method, PackedHotMethod):
            return self.quant_method.cold
        return skip_cold_routes(self, slots)

    @property
    def expert_map(self) -> torch.Tensor | None:
        """For vLLM's kernels: the row in its weights for each slot number that a route may have; -1
        for none."""
        skip = self.kt_skip
        return super().expert_map if skip is None else skip.expert_map

    def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
        return self.kt_layer.slot_of(expert_id)

    def weight_loader(
        self,
        param: Any,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """vLLM's loading callback; a cold matrix goes only to the CPU layer, and an adapter is
        merged into hot ones before vLLM takes its rank's part of them."""
        layer = self.kt_layer
        if layer.placement.all_hot and not layer.adapted and layer.hot is None:
            done = self._load_hot(param, loaded_weight, weight_name, shard_id, expert_id)
            return done if return_success else None
        layer.refuse_reload(f"kt: layer {layer.layer_idx}: {weight_name}")
        if _is_stack(param, loaded_weight):
            for number, one in enumerate(loaded_weight, expert_id):
                self.weight_loader(param, one, weight_name, shard_id, number)
            return True if return_success else None
        if layer.takes_weights and loaded_weight.dim() != 2:
            raise ValueError(
                f"kt: {weight_name}: shape {tuple(loaded_weight.shape)}; expected one matrix of "
                "one expert"
            )
        which, done = MATRIX[layer.activation.gated][shard_id], True
        if layer.slot_of(expert_id) < 0:
            layer.add_weight(expert_id, which, loaded_weight)
        else:
            given = layer.deliver_hot(expert_id, which, loaded_weight, param.dtype)
            if given is not None:
                done = self._load_hot(param, given, weight_name, shard_id, expert_id)
        return done if return_success else None

    # vLLM reads it from the function.
    weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]

    def _load_hot(
        self, param: Any, weight: torch.Tensor, weight_name: str, shard_id: str, expert_id: int
    ) -> bool:
        """Loads a matrix, or a stack, into vLLM's tensor, and notes it. Returns whether vLLM took
        it."""
        done = super().weight_loader(param, weight, weight_name, shard_id, expert_id, True)
        if done:
            which = MATRIX[self.kt_layer.activation.gated].get(shard_id, shard_id)
            end = expert_id + (len(weight) if _is_stack(param, weight) else 1)
            self.kt_delivery.add(parameter_name(self, param), range(expert_id, end), which)
        return bool(done)

    def forward_modular(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **shared: Any
    ) -> torch.Tensor:
        """x [T, H], router weights and global ids [T, k]; vLLM computes shared experts."""
        layer = self.kt_layer
        if layer.placement.all_hot:
            if layer.recorded:
                layer.record(topk_ids, topk_weights, self._padding(x))
            return super().forward_modular(x, topk_weights, topk_ids, **shared)
        skip = self.kt_skip
        cold_slot = -1 if skip is None else skip.prepare(x.shape[0])
        slots, weights = layer.submit(
            x, topk_ids, topk_weights, cold_slot=cold_slot, padding=self._padding(x)
        )
        hot = None
        if skip is not None:
            hot = self._hot(x, weights, slots, **shared)
        elif layer.placement.num_slots:
            slots, some_hot = repeat_hot_routes(slots)
            hot = torch.where(some_hot, self._hot(x, weights, slots, **shared), 0)
        return layer.collect(x, hot)

    def _padding(self, x: torch.Tensor) -> torch.Tensor | None:
        return None if self.kt_padding is None else self.kt_padding.of(x)

    def _hot(
        self, x: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, **shared: Any
    ) -> torch.Tensor:
        """The sum of the hot experts [T, H], computed by vLLM's kernels."""
        hot = super().forward_modular(x, weights, slots, **shared)
        if not isinstance(hot, torch.Tensor):
            raise RuntimeError(
                f"kt: {self.layer_name}: a model that sums the experts itself "
                f"({type(hot).__name__}) is not supported with kt options"
            )
        return hot


class ReadHere(HybridExperts):
    """For a model whose class of experts loads them in its own way: kt-moe reads all of them."""

    def __init__(
        self, layer_name: str, params_dtype: Any, moe_config: Any, quant_config: Any, **more: Any
    ) -> None:
        options = options_of(get_current_vllm_config())
        reads = options is not None and options.weight_path is not None
        if options is None or not reads or (options.hot_option and not options.reads_hot):
            raise ValueError(
                f"kt: {layer_name}: this model's experts have their own loading; kt-moe serves "
                "them from a quantised model only, or with --kt-num-gpu-experts 0 and "
                "--kt-weight-path"
            )
        super().__init__(layer_name, params_dtype, moe_config, quant_config, **more)


def replacements() -> dict[str, type[HybridExperts]]:
    """Our classes by the names of vLLM's that they replace.

    A model with a class of its own, which differs in loading only, is served if vLLM loads none of
    its experts.
    """
    found: dict[str, type[HybridExperts]] = {RoutedExperts.__name__: HybridExperts}
    for ours, own in (
        (ReadHere, getattr(gpt_oss, "GptOssRoutedExperts", None)),
        (HybridExperts, _transformers_experts()),
    ):
        if own is not None:
            found[own.__name__] = type(f"Hybrid{own.__name__}", (ours, own), {})
    return found


def _transformers_experts() -> type | None:
    """vLLM's class for experts of models whose code is transformers'. It differs in the names of
    matrices only. None in a version without it."""
    try:
        from vllm.model_executor.models.transformers import moe
    except ImportError:
        return None
    return getattr(moe, "TransformersRoutedExperts", None)


def select_forward(runner: Any) -> Any:
    """How a model's MoE layer is called; replaces MoERunner._select_forward.

    Returns the opaque operator, which vLLM omits on the CPU. Without it, torch.compile would trace
    into the layer, and our kernels are not torch operations. Raises ValueError if the model uses
    its own class of experts.
    """
    if getattr(runner.routed_experts, "kt_layer", None) is None:
        raise ValueError(
            f"kt: {runner.layer_name}: experts with their own loading or computation "
            f"({type(runner.routed_experts).__name__}) are not supported with kt options"
        )
    ops = torch.ops.vllm
    return ops.moe_forward if runner._shared_experts is None else ops.moe_forward_shared


def _is_stack(param: Any, weight: torch.Tensor) -> bool:
    """Whether vLLM's loader passes the matrices of all experts at once, as Llama-4's does."""
    return weight.dim() == param.dim() == 3


def _computes(place: str, moe_config: Any, router_weight_on_input: bool) -> dict[str, Any]:
    """HybridLayer's arguments for what a model's experts do besides their matrix products."""
    name, limit = moe_config.activation.value, moe_config.swiglu_limit
    if name == "swiglustep" and limit is None:
        limit = _STEP_LIMIT
    activation = activation_of(
        place,
        name,
        router_weight_on_input=router_weight_on_input,
        limit=limit,
        alpha=moe_config.swiglu_alpha,
        beta=moe_config.swiglu_beta,
        situ_beta=getattr(moe_config, "activation_situ_beta", None),  # both from 0.32
        situ_linear_beta=getattr(moe_config, "activation_situ_linear_beta", None),
    )
    return {"activation": activation, "has_bias": moe_config.has_bias}


def _model_of(config: Any, options: KTOptions) -> HybridModel:
    """The model being built: that of earlier layers with this configuration, or a new one.

    A draft model is built with the same configuration, once the served model is loaded.
    """
    served = False
    for runner in config.compilation_config.static_forward_context.values():
        model = getattr(getattr(runner, "routed_experts", None), "kt_model", None)
        if model is not None and not model.loaded:
            return model
        served = served or model is not None
    if not served or config.speculative_config is None:
        return HybridModel(options, config.model_config.hf_text_config)
    quantisation = config.speculative_config.draft_model_config.quantization
    return HybridModel(draft_options(options, quantisation), draft=True)


def _engine_side(config: Any) -> EngineSide:
    cache = config.cache_config

    def memory_left(device: torch.device) -> int:
        free, total = torch.cuda.mem_get_info(device)
        if cache.kv_cache_memory_bytes is not None:
            return free - cache.kv_cache_memory_bytes
        allowed = int(total * cache.gpu_memory_utilization)
        return min(free, allowed - torch.cuda.memory_reserved(device))

    captured = config.compilation_config.max_cudagraph_capture_size or 0
    return EngineSide(
        products,
        interleaves,
        memory_left,
        captured,
        config.scheduler_config.max_num_batched_tokens,
        "--max-cudagraph-capture-size",
    )


def _refuse(layer_name: str, moe_config: Any, arguments: dict[str, Any]) -> None:
    """Raises ValueError if a model's experts need something that the CPU layer does not support."""
    place = f"kt: {layer_name}"
    EXPERT_ARGUMENTS.check(arguments, place)
    _check(EXPERT_CONFIG, moe_config, place)
    _check(EXPERT_RANKS, moe_config.moe_parallel_config, place)
    unpadded = (moe_config.hidden_dim_unpadded, moe_config.intermediate_size_per_partition_unpadded)
    for what, present in (
        (
            "fusing shared experts (VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=0 avoids it)",
            arguments["expert_map_manager"].num_fused_shared_experts > 0,
        ),
        ("redundant experts", moe_config.num_experts != moe_config.num_logical_experts),
        (
            "padding by the model itself",
            unpadded != (moe_config.hidden_dim, moe_config.intermediate_size_per_partition),
        ),
    ):
        if present:
            raise ValueError(f"{place}: {what} is not supported with kt options")


def _refuse_on_cpu(place: str, layer: HybridLayer) -> None:
    """ValueError for hot experts of which vLLM's kernels for the CPU leave out the limit of SwiGLU,
    without an error. They know that of gpt-oss."""
    activation = layer.activation
    if layer.placement.num_slots and activation.swiglu_limit and activation != GPT_OSS:
        raise ValueError(
            f"{place}: {activation}: vLLM's kernels for the CPU compute hot experts without this "
            "limit; accepted: --kt-num-gpu-experts 0"
        )


def _check(known: Arguments, given: Any, place: str) -> None:
    """``known.check`` of all fields of a dataclass."""
    known.check({name: getattr(given, name) for name in known.defaults()}, place)
