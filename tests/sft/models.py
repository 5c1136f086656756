"""Tiny models of the supported families, with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers

_SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
_EXPERTS = dict(moe_intermediate_size=32, num_experts_per_tok=2)
_SHARED = dict(n_shared_experts=1, n_routed_experts=4, first_k_dense_replace=1)
_LATENT = dict(
    q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16
)

#: Config class, model class and arguments by model_type.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        _SIZES | _EXPERTS | dict(num_experts=4, head_dim=16, norm_topk_prob=True),
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        _SIZES | _EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=32),
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        _SIZES
        | _EXPERTS
        | dict(
            num_experts=4,
            shared_expert_intermediate_size=32,
            head_dim=16,
            layer_types=["full_attention"] * 2,
        ),
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        _SIZES | dict(num_local_experts=4, num_experts_per_tok=2),
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        _SIZES | _EXPERTS | _SHARED | _LATENT | dict(n_group=1, topk_group=1),
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        _SIZES | _EXPERTS | _SHARED | _LATENT | dict(n_group=2, topk_group=1),
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        _SIZES | _EXPERTS | _SHARED | dict(head_dim=16, n_group=1, topk_group=1),
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        _SIZES
        | dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=16,
            layer_types=["full_attention"] * 2,
        ),
    ),
}


def tiny(family: str, dtype: torch.dtype = torch.bfloat16, **arguments: Any):
    """A model whose expert weights are exact in bf16."""
    config_class, model_class, given = FAMILIES[family]
    given = given | arguments
    if "layer_types" in given:
        given["layer_types"] = given["layer_types"][: given["num_hidden_layers"]]
    config = getattr(transformers, config_class)(**given)
    config._attn_implementation = config._experts_implementation = "eager"
    torch.manual_seed(1)
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.2)
            parameter.copy_(parameter.bfloat16())
    return model.to(dtype).eval()


def tokens(batch: int = 2, length: int = 12, seed: int = 5) -> torch.Tensor:
    return torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(seed))


def fill_lora(modules, seed: int = 9) -> None:
    """Random LoRA weights, exact in bf16, neither half zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in modules.values():
            for parameter in module.lora_parameters().values():
                values = torch.randn(parameter.shape, generator=generator) * 0.1
                parameter.copy_(values.bfloat16())
