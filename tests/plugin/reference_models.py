"""References of classes that transformers does not know: its classes with some modules exchanged.

They have the names of FAMILIES, or those that ``like`` gives there.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.functional import linear
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextModel
from transformers.models.granitemoeshared.modeling_granitemoeshared import GraniteMoeSharedRMSNorm
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearExperts,
    KimiLinearMLP,
    KimiLinearMoE,
    KimiLinearRMSNorm,
)
from transformers.models.mixtral.modeling_mixtral import (
    MixtralExperts,
    MixtralRMSNorm,
    MixtralTopKRouter,
)
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import (
    Qwen3VLMoeTextRotaryEmbedding,
    Qwen3VLMoeTextTopKRouter,
)
from transformers.models.zaya.modeling_zaya import ZayaSparseMoeBlock


class Step3TextForCausalLM(transformers.GraniteMoeSharedForCausalLM):
    """Queries come from a latent with a norm, and all heads share one key and one value."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            query = layer.self_attn.q_proj
            layer.self_attn.q_proj = nn.Sequential(
                nn.Linear(query.in_features, config.share_q_dim, bias=False),
                GraniteMoeSharedRMSNorm(config.share_q_dim, config.rms_norm_eps),
                nn.Linear(config.share_q_dim, query.out_features, bias=False),
            )
        self.post_init()


class GroupsOfExperts(Qwen3VLMoeTextTopKRouter):
    """Each of router_n_groups groups gives the same number of experts to every token."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.groups = config.router_n_groups

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        scores = logits.float().softmax(-1).unflatten(-1, (self.groups, -1))
        weights, ids = scores.topk(self.top_k // self.groups, -1)
        ids += (torch.arange(self.groups) * scores.shape[-1])[:, None]
        weights = weights.flatten(1)
        return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), ids.flatten(1)


class FourierRotaryEmbedding(Qwen3VLMoeTextRotaryEmbedding):
    """Each frequency is a sum of all, with the same coefficients [heads, D / 2, D / 2] for each
    key-value head."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        half = config.head_dim // 2
        for name in ("cos_coef", "sin_coef"):
            own = torch.eye(half) + torch.randn(half, half) / half
            same = own.expand(config.num_key_value_heads, -1, -1).clone()
            self.register_parameter(name, nn.Parameter(same, requires_grad=False))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = []
        for wave, by in zip(
            super().forward(x, position_ids), (self.cos_coef, self.sin_coef), strict=True
        ):
            half = wave.chunk(2, -1)[0] @ by[0].to(wave.dtype)
            parts.append(torch.cat((half, half), -1))
        return tuple(parts)


class InternS1ProForConditionalGeneration(transformers.Qwen3VLMoeForConditionalGeneration):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        text = self.model.language_model
        text.rotary_emb = FourierRotaryEmbedding(config.text_config)
        for layer in text.layers:
            layer.mlp.gate = GroupsOfExperts(config.text_config)
        self.post_init()


class BankOfExperts(nn.Module):
    """A MoE layer without a shared expert."""

    def __init__(self, gate: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.flatten(0, -2)
        _, weights, ids = self.gate(x)
        return self.experts(x, ids, weights).view(hidden_states.shape)


class InternS2MobiusForConditionalGeneration(transformers.Qwen3_5MoeForConditionalGeneration):
    """Layers share num_blocks banks of experts in turn; each has a shared expert of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        text, blocks = self.model.language_model, config.text_config.num_blocks
        text.meta_mlp = nn.ModuleList()
        for number, layer in enumerate(text.layers):
            gate, experts = layer.mlp.gate, layer.mlp.experts
            del layer.mlp.gate, layer.mlp.experts
            if number < blocks:
                text.meta_mlp.append(BankOfExperts(gate, experts))
            vars(layer.mlp).update(text.meta_mlp[number % blocks].named_children())


class Gemma4UnifiedForConditionalGeneration(transformers.Gemma4UnifiedForConditionalGeneration):
    """With the text model of Gemma 4, which may have experts."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        text = transformers.Gemma4TextConfig(**config.text_config.to_dict())
        self.model.language_model = Gemma4TextModel(text)
        self.post_init()


if hasattr(transformers, "NemotronH_Omni_Reasoning_V3"):  # from 5.19 on

    class NemotronH_Omni_Reasoning_V3(transformers.NemotronH_Omni_Reasoning_V3):
        def get_output_embeddings(self) -> nn.Module:
            return self.language_model.get_output_embeddings()


def situ(gate: torch.Tensor, up: torch.Tensor, config: Any) -> torch.Tensor:
    """Kimi-K3's activation."""
    beta, linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
    bounded = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
    return bounded * linear_beta * torch.tanh(up / linear_beta)


class SituExperts(KimiLinearExperts):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.config = config

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            gate, up = linear(x, self.gate_up_proj[expert]).chunk(2, -1)
            y = linear(situ(gate, up, self.config), self.down_proj[expert])
            out += y * (weights * (ids == expert)).sum(-1, keepdim=True)
        return out


class SituMLP(KimiLinearMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), self.config))


class LatentMoE(KimiLinearMoE):
    """The routed experts compute in a smaller space; the shared experts do not."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        inside = copy.deepcopy(config)
        inside.hidden_size = config.routed_expert_hidden_size
        self.experts = SituExperts(inside)
        width = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = SituMLP(config, width)
        self.routed_expert_down_proj = nn.Linear(config.hidden_size, inside.hidden_size, bias=False)
        self.routed_expert_norm = KimiLinearRMSNorm(inside.hidden_size, config.rms_norm_eps)
        self.routed_expert_up_proj = nn.Linear(inside.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.flatten(0, -2)
        _, weights, ids = self.gate(x)
        routed = self.experts(self.routed_expert_down_proj(x), ids, weights)
        out = self.routed_expert_up_proj(self.routed_expert_norm(routed)) + self.shared_experts(x)
        return out.view(hidden_states.shape)


class KimiK3ForConditionalGeneration(transformers.KimiLinearForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            if isinstance(layer.mlp, KimiLinearMoE):
                layer.mlp = LatentMoE(config)
        self.post_init()


class CappedRouter(MixtralTopKRouter):
    """Logits are bounded by 30, and the weights of a token's experts do not add up to 1."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = 30 * torch.tanh(linear(hidden_states, self.weight).float() / 30)
        weights, ids = logits.softmax(-1).topk(self.top_k, -1)
        return logits, weights, ids


class CappedMoE(nn.Module):
    """Grok's routed experts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        inside = copy.deepcopy(config)
        inside.intermediate_size, inside.hidden_act = config.moe_intermediate_size, "gelu"
        self.gate, self.experts = CappedRouter(config), MixtralExperts(inside)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.flatten(0, -2)
        _, weights, ids = self.gate(x)
        return self.experts(x, ids, weights).view(hidden_states.shape)


class DenseBesideMoE(nn.Module):
    """Grok-2's dense MLP beside the routed experts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.dense, self.block_sparse_moe = Gemma2MLP(config), CappedMoE(config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return (self.dense(hidden_states) + self.block_sparse_moe(hidden_states)) / 2**0.5


class Grok1ForCausalLM(transformers.Gemma2ForCausalLM):
    """Grok-2, which has the class of Grok-1. Its norms multiply by their weights, without the 1
    that Gemma adds."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = DenseBesideMoE(config)
        self.post_init()
        for name, module in [*self.named_modules()]:
            parent, _, own = name.rpartition(".")
            if own.endswith("norm"):
                norm = MixtralRMSNorm(config.hidden_size, config.rms_norm_eps)
                setattr(self.get_submodule(parent), own, norm)
            if own == "block_sparse_moe":  # Gemma initialises no experts
                for weight in module.parameters():
                    nn.init.normal_(weight, std=config.initializer_range)


class SkippingMoE(ZayaSparseMoeBlock):
    """A token whose choice is to skip the experts keeps a part of itself, its router weight."""

    def forward(self, hidden_states: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
        out, states = super().forward(hidden_states, *given)
        logits, weights, *_ = self.gate(hidden_states, *given)
        skipped = logits.softmax(-1)[:, -1:] * (weights == 0)
        return out + hidden_states * skipped.view(*hidden_states.shape[:-1], 1), states


class ZayaForCausalLM(transformers.ZayaForCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.model.layers):
            layer.mlp = SkippingMoE(config, number)
        self.post_init()
        for layer in self.model.layers:
            layer.self_attn.qk_norm.temp.data.fill_(1)
            # So tokens differ in their experts, and some skip them.
            layer.mlp.gate.balancing_biases.zero_()
            for part in ("fc1", "fc2", "out_proj"):
                weight = getattr(layer.mlp.gate.router_mlp, part).weight.data
                weight.sub_(weight.mean(1, keepdim=True)).mul_(2)
