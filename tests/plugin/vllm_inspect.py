"""Runs in the vLLM environment, in the model's process: functions of a module can be sent there."""

from typing import Any

import torch


def inspect_model(model: Any) -> dict[str, Any]:
    """The content of the first MoE layer, and the counters of all layers."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    hybrid = [layer.kt_layer for layer in layers if hasattr(layer, "kt_layer")]
    return {
        "hybrid": type(layers[0]).__name__,
        "hot_rows": len(getattr(layers[0], "w13_weight", ())),
        "describe": [layer.describe() for layer in hybrid],
        "stats": [dict(layer.stats()) for layer in hybrid],
        "model_stats": layers[0].kt_model.stats() if hybrid else {},
    }


def mla_on_cpu() -> dict[str, str]:
    """Arguments with which vLLM's MLA on the CPU has float32: what it selects with AMX has 16 bits
    only. Other attention ignores them."""
    return {} if torch.cuda.is_available() else {"attention_backend": "CPU_MLA"}
