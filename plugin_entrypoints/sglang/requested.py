"""SGLang plugin: what a model requests of an expert layer. Imported only inside SGLang."""

from typing import Any

from sglang.srt.layers.moe.fused_moe_triton import layer as fused_moe

from kt_kernel.moe.activation import ExpertActivation
from kt_kernel.serving.activations import activation_of

_SITU_BETA = 4.0  # SGLang's kernels use it if a model gives none


def requested_activation(place: str, runner: Any) -> ExpertActivation:
    """What an expert computes, according to a MoeRunnerConfig."""
    name, given = runner.activation, {}
    alpha, limit = runner.gemm1_alpha or None, runner.gemm1_clamp_limit or None
    if name == "situ":  # SGLang passes its values by these names
        given = {"situ_beta": alpha or _SITU_BETA, "situ_linear_beta": limit}
    else:
        beta = getattr(runner, "gemm1_beta", None) or None
        if alpha is not None and beta is None:
            beta = 1.0  # SGLang's kernels always add it
        if name == "silu" and limit is not None and alpha is None:
            name = "swiglustep"  # this limit clamps SiLU's result, swiglu_limit its argument
        given = {"limit": limit or runner.swiglu_limit or None, "alpha": alpha, "beta": beta}
    return activation_of(
        place,
        name,
        gated=runner.is_gated,
        router_weight_on_input=runner.apply_router_weight_on_input,
        **given,
    )


def refuse_layer(layer_idx: int, layer: Any, fused_wrongly: bool) -> None:
    """ValueError for a kind of layer that the hybrid layer does not support."""
    for what, present in (
        (f"a layer of class {type(layer).__name__}", type(layer) is not fused_moe.FusedMoE),
        ("expert parallelism", layer.moe_ep_size > 1),
        (
            "fusing shared experts (despite --disable-shared-experts-fusion)",
            fused_wrongly,
        ),
    ):
        if present:
            raise ValueError(f"layer {layer_idx}: {what} is not supported with kt options")
