"""SGLang plugin: hot experts whose weights kt-moe fills in, as 16-bit values or packed.

Imported only inside SGLang.
"""

from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase

from kt_kernel.serving.activations import SILU
from kt_kernel.serving.hot_packed import packed_hot
from kt_kernel.serving.hot_weights import DenseHot
from kt_kernel.serving.hybrid import HybridLayer

from ..common import instead_of_converting, own_parameters

#: SGLang's names of the activations that its kernels for the CPU compute, with a gate.
CPU_ACTIVATIONS = ("silu", "gelu", "situ")


class PackedHotMethod(FusedMoEMethodBase):
    """The method of a layer whose hot experts have 4 or 8 bits: SGLang's Triton kernels for such
    weights and 16-bit activations."""

    def __init__(self, own: HybridLayer) -> None:
        super().__init__()
        self._own = own

    def create_weights(
        self, layer: Any, *args: Any, params_dtype: torch.dtype, **extra: Any
    ) -> None:
        """Allocates the experts. SGLang delivers their matrices, unless kt-moe reads them."""
        own = self._own
        device = torch.empty(0).device
        shape = own.hot_shape(layer.moe_tp_rank, layer.moe_tp_size)
        hot = packed_hot(own.options, own.layer_idx, own.placement, shape, params_dtype, device)
        own.hot = self._hot = hot
        for name, tensor in (("w13_weight", hot.w13), ("w2_weight", hot.w2)):
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            layer.register_parameter(name, parameter)
            parameter.weight_loader = extra["weight_loader"]  # type: ignore[attr-defined]

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing is left to do."""

    def create_moe_runner(self, layer: Any, moe_runner_config: Any) -> None:
        self._config = moe_runner_config

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        """The sum of the experts [T, H]; routes to slot -1 are skipped."""
        # It imports kernels that exist for GPUs only.
        from sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe import fused_experts

        hot = self._hot
        summed = fused_experts(
            dispatch_output.hidden_states,
            hot.w13,
            hot.w2,
            dispatch_output.topk_output,
            self._config,
            use_int4_w4a16=hot.bits == 4,
            use_int8_w8a16=hot.bits == 8,
            w1_scale=hot.s13,
            w2_scale=hot.s2,
            w1_zp=hot.z13,
            w2_zp=hot.z2,
            block_shape=[0, hot.group] if hot.group else None,
        )
        return StandardCombineInput(hidden_states=summed)


def hold_dense(layer: Any, own: HybridLayer) -> None:
    """Makes kt-moe fill the tensors of SGLang's unquantised method. Raises ValueError if SGLang
    holds them in another layout."""
    held = {name: tensor.data for name, tensor in own_parameters(layer).items()}
    own.hot = DenseHot(
        f"layer {own.layer_idx}",
        own.hot_shape(layer.moe_tp_rank, layer.moe_tp_size),
        held["w13_weight"],
        held["w2_weight"],
        b13=held.get("w13_weight_bias"),
        b2=held.get("w2_weight_bias"),
        interleaved=_as_in_gpt_oss(layer.moe_runner_config),
    )


def _as_in_gpt_oss(runner: Any) -> bool:
    """Whether experts have a limit and an alpha, and SGLang's kernels take rows of gate and up in
    turn for them."""
    given = None not in (runner.gemm1_alpha, runner.gemm1_clamp_limit)
    return given and runner.activation == "silu" and runner.gate_up_interleaved


def refuse_activation(own: HybridLayer, runner: Any, has_bias: bool, packed: bool) -> None:
    """ValueError for hot experts that were not tested with weights that kt-moe fills in.

    runner: the layer's MoeRunnerConfig.
    """
    if (own.activation == SILU and not has_bias) or (not packed and _as_in_gpt_oss(runner)):
        return
    raise ValueError(
        f"layer {own.layer_idx}: in SGLang, kt-moe converts the weights of hot experts only if "
        "they have no biases and plain SwiGLU, or to 16 bits if they compute as those of gpt-oss "
        f"do; accepted: {instead_of_converting(own.options)}"
    )


def refuse_on_cpu(own: HybridLayer, runner: Any) -> None:
    """ValueError for hot experts that SGLang's kernels for the CPU do not compute: they end the
    first forward pass with an error, and leave out the limit or the alpha of SwiGLU without one.
    They know those of gpt-oss.

    runner: the layer's MoeRunnerConfig.
    """
    activation = own.activation
    place, accepted = f"layer {own.layer_idx}", "accepted: --kt-num-gpu-experts 0"
    if runner.activation not in CPU_ACTIVATIONS or not runner.is_gated:
        raise ValueError(
            f"{place}: {activation}: SGLang's kernels for the CPU compute hot experts with "
            f"{', '.join(CPU_ACTIVATIONS)} and a gate only; {accepted}"
        )
    if (activation.swiglu_limit or activation.swiglu_alpha) and not _as_in_gpt_oss(runner):
        raise ValueError(
            f"{place}: {activation}: SGLang's kernels for the CPU compute hot experts without "
            f"these numbers; {accepted}"
        )
