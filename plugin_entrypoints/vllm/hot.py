"""vLLM plugin: hot experts whose weights kt-moe fills in, as 16-bit values or packed.

Imported only inside vLLM.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# The package before its modules, because vLLM's modules have circular imports.
import vllm.model_executor.layers.fused_moe  # noqa: F401
from vllm.model_executor.layers.fused_moe import fused_moe, override_config
from vllm.model_executor.layers.fused_moe.config import (
    int4_w4a16_moe_quant_config,
    int8_w8a16_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from kt_kernel.serving.activations import SILU
from kt_kernel.serving.hot_packed import PackedHot, packed_hot
from kt_kernel.serving.hot_weights import DenseHot, HotShape
from kt_kernel.serving.hybrid import HybridLayer

from ..common import own_parameters

_ROUTES_IN_LARGE_BLOCKS = 16
_INTERLEAVED = "swigluoai"  # the activation whose kernels expect rows of gate and up in turn


class PackedHotMethod(FusedMoEMethodBase):
    """The method of a layer whose hot experts have 4 or 8 bits: vLLM's Triton and CUDA kernels for
    such weights and 16-bit activations.

    computes: the keywords of HybridLayer for the experts' activation and biases. Raises ValueError
    for those that the kernels do not have.
    """

    def __init__(self, moe_config: Any, layer: HybridLayer, computes: dict[str, Any]) -> None:
        super().__init__(moe_config)
        self._layer = layer
        if computes != {"activation": SILU, "has_bias": False}:
            raise ValueError(
                f"layer {layer.layer_idx}: --kt-hot-format packed: vLLM's kernels are for experts "
                "without biases and with plain SwiGLU; accepted: bf16"
            )

    def create_weights(
        self, layer: Any, *args: Any, params_dtype: torch.dtype, **extra: Any
    ) -> None:
        """Allocates the experts, as parameters if vLLM delivers their matrices."""
        own = self._layer
        device = torch.empty(0).device
        hot = packed_hot(
            own.options, own.layer_idx, own.placement, _shape(layer), params_dtype, device
        )
        own.hot = self._hot = hot
        for name, tensor in (("w13_weight", hot.w13), ("w2_weight", hot.w2)):
            if own.options.reads_hot:
                layer.register_buffer(name, tensor, persistent=False)
                continue
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            layer.register_parameter(name, parameter)
            parameter.weight_loader = extra["weight_loader"]  # type: ignore[attr-defined]

    def process_weights_after_loading(self, layer: Any) -> None:
        hot = self._hot
        describe = int4_w4a16_moe_quant_config if hot.bits == 4 else int8_w8a16_moe_quant_config
        self.moe_quant_config = describe(
            w1_scale=hot.s13,
            w2_scale=hot.s2,
            w1_zp=hot.z13,
            w2_zp=hot.z2,
            block_shape=[0, hot.group] if hot.group else None,
        )
        self.cold = ColdAsLast(hot.shape.slots, hot.w13.device)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return self.moe_quant_config

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any
    ) -> tuple[int, int]:
        """The sizes unchanged: the kernels take any multiple of the group size."""
        return hidden_size, intermediate_size_per_partition

    def maybe_make_prepare_finalize(self, **given: Any) -> None:
        """vLLM 0.26 calls it under tensor parallelism if loading created no kernel."""

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *args: Any,
        **shared: Any,
    ) -> torch.Tensor:
        """The sum of the experts [T, H]. topk_ids: slots, or `ColdAsLast.prepare` for none."""
        with accepted_blocks(self._hot, *topk_ids.shape):
            return fused_moe.fused_experts(
                x.contiguous(),
                self._hot.w13,
                self._hot.w2,
                topk_weights,
                topk_ids,
                activation=layer.activation,
                global_num_experts=self._hot.shape.slots + 1,
                expert_map=self.cold.expert_map,
                quant_config=self.moe_quant_config,
            )


def accepted_blocks(hot: PackedHot, tokens: int, top_k: int) -> AbstractContextManager[Any]:
    """Inside, vLLM's CUDA kernel for small batches gets blocks that it accepts.

    It accepts 1, 2, 4 or 8 groups in a block of columns. With groups of 32, vLLM may choose other
    blocks: of 512 columns in batches of at most 16 routes, and of 96 if 128 do not divide a size.
    """
    routes, sizes = tokens * top_k, (hot.shape.hidden, hot.shape.size)
    odd = any(size % 128 for size in sizes)
    if hot.group != 32 or (routes > _ROUTES_IN_LARGE_BLOCKS and not odd):
        return nullcontext()
    if not fused_moe.should_moe_wna16_use_cuda(routes, hot.group, hot.shape.slots, hot.bits):
        return nullcontext()
    rows = max(1, min(16, tokens))
    columns = next(n for n in (256, 128, 64, 32) if not any(size % n for size in sizes))
    return override_config(
        {"BLOCK_SIZE_M": rows, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": columns, "SPLIT_K": 1}
    )


class ColdAsLast:
    """How kernels that sort every batch by expert skip cold routes: as those of an expert after the
    last slot, which the expert map marks as remote."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.expert_map = torch.tensor([*range(slots), -1], dtype=torch.int32, device=device)
        self._slots = slots

    def prepare(self, tokens: int) -> int:
        """The slot number of cold experts."""
        return self._slots


def hold_dense(experts: Any) -> None:
    """Makes kt-moe fill the tensors of vLLM's unquantised method. experts: a HybridExperts.

    Raises ValueError if vLLM holds them in another layout.
    """
    own = {name: tensor.data for name, tensor in own_parameters(experts).items()}
    experts.kt_layer.hot = DenseHot(
        f"layer {experts.kt_layer.layer_idx}",
        _shape(experts),
        own["w13_weight"],
        own["w2_weight"],
        b13=own.get("w13_bias"),
        b2=own.get("w2_bias"),
        interleaved=experts.activation.value == _INTERLEAVED,
    )


def _shape(experts: Any) -> HotShape:
    own, ranks = experts.kt_layer, experts.moe_config.moe_parallel_config
    return own.hot_shape(ranks.tp_rank, ranks.tp_size)
