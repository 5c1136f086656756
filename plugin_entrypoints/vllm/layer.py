"""vLLM plugin: the MoE layer whose cold experts live on the CPU. Imported only inside vLLM."""

import functools
import logging
from typing import Any

import torch

# The package before routed_experts: vLLM's modules import each other in a circle.
import vllm.model_executor.layers.fused_moe  # noqa: F401
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
from vllm.model_executor.models.utils import extract_layer_index

from kt_kernel.layer import HybridLayer, HybridModel
from kt_kernel.options import KTOptions
from kt_kernel.report import watch

from .options import options_of
from .padding import Padding

_logger = logging.getLogger("vllm.kt")
_MATRIX = {"w1": "gate", "w3": "up", "w2": "down"}


class HybridExperts(RoutedExperts):
    """RoutedExperts with the hot experts in vLLM's kernels and the cold ones in ours.

    Without kt options, or with all experts hot, it is RoutedExperts and nothing else.
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
        self.kt_model: HybridModel | None = None
        self.kt_layer: HybridLayer | None = None
        self.kt_padding: Padding | None = None
        if options is not None:
            _refuse(layer_name, moe_config, kwargs)
            self.kt_model = _model_of(config, options)
            self.kt_padding = Padding(config)
            ranks = moe_config.moe_parallel_config
            # moe_config's sizes, before vLLM pads them for its kernels.
            self.kt_layer = self.kt_model.add_layer(
                layer_idx=extract_layer_index(layer_name),
                num_experts=moe_config.num_experts,
                num_experts_per_tok=moe_config.experts_per_token,
                hidden_size=moe_config.hidden_dim,
                moe_intermediate_size=moe_config.intermediate_size_per_partition * ranks.tp_size,
                activation=moe_config.activation.value,
                max_tokens=moe_config.max_num_tokens,
                has_cpu_part=ranks.tp_rank == 0,
            )
            moe_config.num_local_experts = self.kt_layer.num_hot  # vLLM allocates this many
        super().__init__(layer_name, params_dtype, moe_config, quant_config, **kwargs)
        if self.kt_layer is not None:
            self._check_method()
            self._hook_end_of_loading()

    def _check_method(self) -> None:
        if not isinstance(self.quant_method, (UnquantizedFusedMoEMethod, Fp8MoEMethod)):
            raise ValueError(
                f"kt: {self.layer_name}: {type(self.quant_method).__name__} is not supported; "
                "kt-moe takes BF16, FP16, FP32 and FP8 checkpoints so far"
            )
        if self.quant_method.is_monolithic:
            raise ValueError(
                f"kt: {self.layer_name}: the chosen MoE backend routes inside its kernel; "
                "add --moe-backend triton"
            )
        if self.hidden_size != self.kt_layer.hidden_size:
            raise ValueError(
                f"kt: {self.layer_name}: the chosen MoE backend pads the hidden size "
                f"{self.kt_layer.hidden_size} to {self.hidden_size}, which is not supported; "
                "add --moe-backend triton"
            )

    def _hook_end_of_loading(self) -> None:
        after_loading = self.quant_method.process_weights_after_loading

        def finish(layer: Any) -> None:
            self.kt_layer.finish_loading()
            if self.kt_layer.num_hot:  # vLLM's repacking does not expect an empty weight
                after_loading(layer)
            if self.kt_model.loaded:
                watch(self.kt_model, _logger)

        self.quant_method.process_weights_after_loading = finish
        if self.kt_layer.num_hot == 0:
            # vLLM 0.26 asks for it under tensor parallelism, where loading made no kernel.
            self.quant_method.maybe_make_prepare_finalize = lambda **given: None

    def _map_global_expert_id_to_local_expert_id(self, expert_id: int) -> int:
        if self.kt_layer is None:
            return super()._map_global_expert_id_to_local_expert_id(expert_id)
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
        """vLLM's loading callback; a cold matrix goes to the CPU layer and nowhere else."""
        layer = self.kt_layer
        if layer is None or layer.num_cold == 0:
            return super().weight_loader(
                param, loaded_weight, weight_name, shard_id, expert_id, return_success
            )
        layer.refuse_reload(f"kt: layer {layer.layer_idx}: {weight_name}")
        if layer.takes_weights and loaded_weight.dim() != 2:
            raise ValueError(
                f"kt: {weight_name}: shape {tuple(loaded_weight.shape)}; one matrix of one "
                "expert is expected"
            )
        if layer.slot_of(expert_id) >= 0:
            return super().weight_loader(
                param, loaded_weight, weight_name, shard_id, expert_id, return_success
            )
        layer.add_weight(expert_id, _MATRIX[shard_id], loaded_weight)
        return True if return_success else None

    weight_loader.supports_moe_loading = True  # vLLM reads it from the function

    def forward_modular(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, **shared: Any
    ) -> torch.Tensor:
        """x [T, H], router weights and global ids [T, k]; shared experts are vLLM's business."""
        layer = self.kt_layer
        if layer is None or layer.num_cold == 0:
            return super().forward_modular(x, topk_weights, topk_ids, **shared)
        padding = self.kt_padding.of(x)
        slots, weights = layer.submit(x, topk_ids, topk_weights, padding=padding)
        hot = super().forward_modular(x, weights, slots, **shared) if layer.num_hot else None
        return layer.collect(x, hot)


def install() -> None:
    """Registers HybridExperts in RoutedExperts' place. RuntimeError if something else is there."""
    other = op_registry_oot.get(RoutedExperts.__name__)
    if other is not None:
        raise RuntimeError(
            f"another plugin has replaced RoutedExperts by {other.__module__}.{other.__name__}"
        )
    RoutedExperts.register_oot(HybridExperts)
    _hook_runner()


def _hook_runner() -> None:
    select_forward = MoERunner._select_forward

    @functools.wraps(select_forward)
    def select_forward_with_kt(self: MoERunner) -> Any:
        if options_of(get_current_vllm_config()) is None:
            return select_forward(self)
        if getattr(self.routed_experts, "kt_layer", None) is None:
            # A model with an expert class of its own: vLLM did not build ours.
            raise ValueError(
                f"kt: {self.layer_name}: {type(self.routed_experts).__name__}, experts with "
                "loading or computation of the model's own, is not supported together with "
                "kt options"
            )
        # The opaque operator, which vLLM leaves out on the CPU: torch.compile would trace into the
        # layer, and our kernels are no torch operations.
        ops = torch.ops.vllm
        return ops.moe_forward if self._shared_experts is None else ops.moe_forward_shared

    MoERunner._select_forward = select_forward_with_kt


def _model_of(config: Any, options: KTOptions) -> HybridModel:
    """The model under construction: that of this configuration's earlier layers, or a new one."""
    for runner in config.compilation_config.static_forward_context.values():
        model = getattr(getattr(runner, "routed_experts", None), "kt_model", None)
        if model is not None:
            return model
    return HybridModel(options)


def _refuse(layer_name: str, moe_config: Any, kwargs: dict[str, Any]) -> None:
    """What a model asks of its experts that the CPU layer does not do; ValueError names it."""
    parallel = moe_config.moe_parallel_config
    manager = kwargs.get("expert_map_manager")
    for what, present in (
        ("expert biases", moe_config.has_bias),
        ("LoRA on experts", moe_config.is_lora_enabled),
        ("router weight on input", kwargs.get("apply_router_weight_on_input", False)),
        ("a SwiGLU limit", bool(kwargs.get("swiglu_limit"))),
        ("a SwiGLU alpha", bool(kwargs.get("swiglu_alpha"))),
        (
            "fusing shared experts (VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=0 avoids it)",
            getattr(manager, "num_fused_shared_experts", 0) > 0,
        ),
        ("redundant experts", moe_config.num_experts != moe_config.num_logical_experts),
        (
            "expert or data parallelism",
            parallel.use_ep or max(parallel.dp_size, parallel.pcp_size) > 1,
        ),
        (f"activation {moe_config.activation.value}", moe_config.activation.value != "silu"),
    ):
        if present:
            raise ValueError(f"kt: {layer_name}: {what} is not supported together with kt options")
