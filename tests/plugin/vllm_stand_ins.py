"""Stand-ins for routing that vLLM has on GPUs only. Imported first in vLLM's process on the CPU.

vLLM 0.32 routes on the CPU by softmax, by groups, or as DeepSeek-V4 does; experts without a gate
are refused there, and zero experts need Triton. With this module, MoE layers that need these can be
built and routed, so that kt-moe's part can be compared. Sparse attention, of DeepSeek-V3.2, is
replaced where it chooses all tokens. Other attention is untouched.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Step3p7VisionConfig
from vllm.model_executor.layers.fused_moe import config
from vllm.model_executor.layers.fused_moe.router import (
    cpu_router,
    fused_topk_bias_router,
    zero_expert_router,
)
from vllm.model_executor.layers.mla import MLAModules
from vllm.model_executor.layers.rotary_embedding.ernie45_vl_rope import Ernie4_5_VLRotaryEmbedding
from vllm.model_executor.models import deepseek_v2, interns1_pro, openpangu_vl, step3p7
from vllm.models.qwen4_exp.nvidia import hyperconnection
from vllm.platforms import current_platform

compute_routing = cpu_router.CPURouter._compute_routing
post_init = config.FusedMoEConfig.__post_init__
build_pangu = openpangu_vl.OpenPanguVLForConditionalGeneration.__init__


@functools.wraps(compute_routing)
def with_sigmoid(self: Any, x: torch.Tensor, logits: torch.Tensor, *given: Any, **more: Any) -> Any:
    """Routing by sigmoid without groups: vLLM's own function for groups, with one group."""
    plain = not self.use_grouped_topk and self.custom_routing_function is None
    if not plain or self.scoring_func != "sigmoid":
        return compute_routing(self, x, logits, *given, **more)
    return cpu_router._grouped_topk(
        gating_output=logits,
        topk=self.top_k,
        renormalize=self.renormalize,
        num_expert_group=1,
        topk_group=1,
        scoring_func=self.scoring_func,
        routed_scaling_factor=self.routed_scaling_factor,
        e_score_correction_bias=self.e_score_correction_bias,
    )


def biased_softmax(
    weights: torch.Tensor,
    ids: torch.Tensor,
    unused: torch.Tensor,
    logits: torch.Tensor,
    renormalize: bool = False,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router weights and experts [T, k]: the bias [E] takes part in the choice alone."""
    scores = logits.float().softmax(-1)
    chosen = (scores if bias is None else scores + bias).topk(ids.shape[1]).indices
    weights.copy_(scores.gather(1, chosen))
    if renormalize:
        weights /= weights.sum(1, keepdim=True)
    return weights, ids.copy_(chosen)


def identities(
    expert_indices: torch.Tensor,
    expert_scales: torch.Tensor,
    num_experts: int,
    zero_expert_type: str,
    hidden_states: torch.Tensor,
) -> torch.Tensor:
    """What experts from num_experts on give [T, H]: their inputs, weighted."""
    assert zero_expert_type == "identity"
    own = torch.where(expert_indices >= num_experts, expert_scales, 0)
    return hidden_states * own.sum(1, keepdim=True).to(hidden_states.dtype)


@functools.wraps(post_init)
def without_gate(self: Any) -> None:
    try:
        post_init(self)  # its last check refuses experts without a gate on the CPU
    except NotImplementedError as error:
        if "is_act_and_mul=False" not in str(error):
            raise


def dense(**given: Any) -> MLAModules:
    """Attention to all tokens, as sparse attention is in contexts no longer than index_topk. The
    indexer, which would choose tokens, is loaded and not called."""
    return MLAModules(**given | {"is_sparse": False})


def gemma_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, groups: int) -> torch.Tensor:
    """x [T, groups * H], each group normalised by itself."""
    y = x.float().unflatten(-1, (groups, -1))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y.flatten(1) * (1 + weight.float())).to(x.dtype)


def combine(
    streams: torch.Tensor, added: torch.Tensor, logits: torch.Tensor | None, count: int
) -> torch.Tensor:
    """streams [T, count * H], and added [T, H] to each, scaled by logits [T, count]."""
    more = added.float()[:, None]
    if logits is not None:
        more = more * (2 * torch.sigmoid(logits.float() / count))[..., None]
    return (streams.float().unflatten(-1, (count, -1)) + more).flatten(1).to(streams.dtype)


def combine_and_norm(
    streams: torch.Tensor,
    added: torch.Tensor,
    logits: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = combine(streams, added, logits, count)
    return out, gemma_norm(out, weight, eps, count)


def mix(x: torch.Tensor, gate: torch.Tensor, count: int) -> torch.Tensor:
    """The mean [T, H] of streams x [T, count * H], gated."""
    y = x.float() * torch.sigmoid(gate.float())
    return y.unflatten(-1, (count, -1)).mean(1).to(x.dtype)


def scaled_silu(x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.nn.functional.silu(x.float() / count).to(x.dtype)


class NoEncoder(torch.nn.Module):
    """Of images, in a model that gets none."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__()


@functools.wraps(build_pangu)
def with_images_described(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
    """Its configuration's class is code of a repository, without which a part is a dictionary."""
    config = vllm_config.model_config.hf_config
    config.vision_config = SimpleNamespace(**config.vision_config)
    build_pangu(self, vllm_config=vllm_config, prefix=prefix)


cpu_router.CPURouter._compute_routing = with_sigmoid
fused_topk_bias_router.vllm_topk_softmax = biased_softmax
zero_expert_router.zero_experts_compute_triton = identities
config.FusedMoEConfig.__post_init__ = without_gate
deepseek_v2.MLAModules = dense
deepseek_v2.DeepseekV32IndexerCache.get_kv_cache_spec = lambda self, config: None
# The function for the CPU that this class inherits passes one argument too many.
Ernie4_5_VLRotaryEmbedding.forward_cpu = Ernie4_5_VLRotaryEmbedding.forward_native
# Pangu-VL's encoder needs FlashAttention.
openpangu_vl.OpenPanguVisionTransformer = NoEncoder
openpangu_vl.OpenPanguVLForConditionalGeneration.__init__ = with_images_described
openpangu_vl.OpenPanguVLForConditionalGeneration._parse_preprocess_params = lambda *given: None
# transformers' configuration of Step-3.7's images has other names; no image is encoded.
step3p7.PerceptionEncoder = NoEncoder
Step3p7VisionConfig.width = property(lambda self: self.hidden_size)
# Qwen4Exp's streams, for which vLLM has kernels of Triton.
hyperconnection.grouped_gemma_rmsnorm = gemma_norm
hyperconnection.hc_combine = combine
hyperconnection.hc_combine_norm = combine_and_norm
hyperconnection.hc_gate_mix = mix
hyperconnection.hc_silu = scaled_silu
# For each model, vLLM looks through all modules, and fails at some that models may have imported.
current_platform.register_triton_kernel_overrides()
type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
interns1_pro.InternS1ProForConditionalGeneration.model_config = None
