"""Tiny models of the text classes that appeared in 2025 and 2026."""

from __future__ import annotations

import json
from typing import Any

from family_settings import (
    EXPERTS,
    GROUPS,
    LINEAR_ATTENTION,
    MLA,
    NEMOTRON_H,
    SHARED,
    TOP_K,
    VOCABULARY,
    Family,
)

# On CPUs with AMX, vLLM would select an attention backend without float32.
CPU_MLA = {"attention_backend": "CPU_MLA"}
# SGLang's attention in torch has neither MLA nor sinks. Triton's interpreter runs this one.
TRITON = {"attention_backend": "triton"}
# SGLang's own choice needs a GPU.
RECURRENT = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
BFLOAT16 = {"dtype": "bfloat16"}
# What SGLang reads, and transformers does not write.
SLIDING_HEADS = {"swa_num_key_value_heads": 2}
DENSE_FIRST = dict(mlp_layer_types=["dense", "sparse"])
SLIDING = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=64)
GEMMA4 = SLIDING | dict(
    enable_moe_block=True,
    top_k_experts=TOP_K,
    hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=VOCABULARY,
    global_head_dim=32,
    per_layer_config={},
)
ONE_GROUP = dict(n_group=1, topk_group=1, n_shared_experts=1, routed_scaling_factor=2.5)
ROPE = dict(rope_type="default", rope_theta=10000.0)
# Attention to at most as many tokens as any test has.
SPARSE = dict(index_topk=256, index_n_heads=4, index_head_dim=128, scoring_func="sigmoid")
ROPE_BY_KIND = dict(
    rope_parameters={
        kind: dict(rope_type="default", rope_theta=theta)
        for kind, theta in (("full_attention", 500000.0), ("sliding_attention", 10000.0))
    }
)


def overriding(**settings: Any) -> dict[str, str]:
    """SGLang's argument that changes config.json."""
    return {"json_model_override_args": json.dumps(settings)}


FAMILIES_2026: dict[str, Family] = {
    "AfmoeForCausalLM": Family(
        SLIDING
        | dict(
            num_dense_layers=1, num_shared_experts=1, route_scale=2.5, global_attn_every_n_layers=2
        ),
        {},
        {"model_impl": "transformers"},  # SGLang's own code has no layer of experts
        replaced=dict(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1),
    ),
    "AXK1ForCausalLM": Family(
        MLA | GROUPS | dict(topk_method="noaux_tc", scoring_func="sigmoid"),
        CPU_MLA,
        # A norm that dense layers have and do not use.
        added={"model.layers.0.post_mlp_layernorm.weight": (128,)},
    ),
    "DbrxForCausalLM": Family(
        dict(
            d_model=128,
            n_heads=4,
            n_layers=2,
            max_seq_len=512,
            attn_config=dict(kv_n_heads=2, clip_qkv=8.0, rope_theta=10000.0),
            ffn_config=dict(
                hidden_size=128,
                ffn_hidden_size=32,
                moe_num_experts=EXPERTS,
                moe_top_k=TOP_K,
                moe_normalize_expert_weights=1.0,
            ),
        ),
    ),
    "DeepseekV4ForCausalLM": Family(
        dict(
            num_key_value_heads=1,
            head_dim=512,
            q_lora_rank=32,
            qk_rope_head_dim=64,
            n_shared_experts=1,
            scoring_func="sqrtsoftplus",
            routed_scaling_factor=1.5,
            layer_types=["sliding_attention", "sliding_attention"],
            mlp_layer_types=["hash_moe", "moe"],
            hc_mult=4,
            hc_sinkhorn_iters=4,
            sliding_window=64,
            o_groups=2,
            o_lora_rank=32,
            index_n_heads=4,
            index_head_dim=128,
            index_topk=16,
            num_nextn_predict_layers=0,
            swiglu_limit=10.0,
        ),
        untried=("vllm",),
        replaced=dict(
            compress_ratios=[0, 0],
            num_hash_layers=1,
            topk_method="noaux_tc",
            layer_types=None,
            mlp_layer_types=None,
        ),
        renamed={"model.hc_head.hc_": "hc_head_", ".attn.norm.": ".attn.kv_norm."},
    ),
    "DeepseekV32ForCausalLM": Family(
        MLA | GROUPS | SPARSE, CPU_MLA, untried=("sglang",), replaced=dict(topk_method="noaux_tc")
    ),
    "Dots1ForCausalLM": Family(
        ONE_GROUP | dict(first_k_dense_replace=1, layer_types=["full_attention"] * 2), {}, {}
    ),
    "FlexOlmoForCausalLM": Family({}, {}),
    "Gemma4ForCausalLM": Family(
        GEMMA4,
        {},
        TRITON | overriding(**SLIDING_HEADS),
        by_stock=("sglang",),
        settings="Gemma4TextConfig",
    ),
    "Glm4MoeLiteForCausalLM": Family(
        MLA | ONE_GROUP | DENSE_FIRST,
        CPU_MLA,
        TRITON,
        replaced=dict(first_k_dense_replace=1),
    ),
    "GlmMoeDsaForCausalLM": Family(
        MLA | ONE_GROUP | DENSE_FIRST | SPARSE | dict(first_k_dense_replace=1),
        CPU_MLA,
        untried=("sglang",),
        replaced=dict(topk_method="noaux_tc", moe_layer_freq=1),
    ),
    "GraniteMoeSWAForCausalLM": Family(
        SLIDING | dict(shared_intermediate_size=64, layer_rope_theta=[10000.0, 10000.0]), {}, TRITON
    ),
    "GraniteMoeHybridForCausalLM": Family(
        dict(
            shared_intermediate_size=64,
            layer_types=["mamba", "attention"],
            mamba_n_heads=4,
            mamba_d_head=64,
            mamba_n_groups=1,
            mamba_d_state=64,
            position_embedding_type="rope",
        ),
        {},
        RECURRENT,
        wide=dict(mamba_n_heads=16),
        mean=0.02,
        replaced=dict(layer_types=["mamba", "attention"]),
    ),
    "HYV3ForCausalLM": Family(
        dict(num_shared_experts=1, router_scaling_factor=2.5) | DENSE_FIRST,
        {},
        {},
        replaced=dict(first_k_dense_replace=1, route_norm=True, qk_norm=True),
        repeated=dict(expert_hidden_dim="moe_intermediate_size"),
    ),
    "HYV4ForCausalLM": Family(
        MLA | ONE_GROUP | DENSE_FIRST | SPARSE | dict(hc_mult=2, head_dim=96, swiglu_limit=10.0),
        untried=("sglang",),
        replaced=dict(topk_method="noaux_tc", moe_layer_freq=1, first_k_dense_replace=1),
        renamed={".mlp.linear_gate": ".mlp.gate_proj", "experts.linear_gate": "experts.gate_proj"},
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        dict(moe_topk=TOP_K, num_shared_expert=1, use_mixed_mlp_moe=True),
        {},
        untried=("sglang",),
        replaced=dict(use_qk_norm=True, moe_intermediate_size=32),
    ),
    "LagunaForCausalLM": Family(
        SHARED | SLIDING | DENSE_FIRST | ROPE_BY_KIND | dict(num_attention_heads_per_layer=[4, 4]),
        {},
        {},
        unset="e_score_correction_bias",
    ),
    "JambaForCausalLM": Family(
        dict(
            expert_layer_period=2,
            expert_layer_offset=1,
            attn_layer_period=2,
            attn_layer_offset=1,
            mamba_dt_rank=8,
            use_mamba_kernels=False,
        ),
        gpu=("vllm",),
    ),
    "KimiLinearForCausalLM": Family(
        MLA
        | DENSE_FIRST
        | dict(
            q_lora_rank=None,
            num_experts_per_token=TOP_K,
            num_shared_experts=1,
            num_expert_group=1,
            topk_group=1,
            routed_scaling_factor=2.5,
            layer_types=["linear_attention", "full_attention"],
            linear_num_heads=4,
            linear_head_dim=128,
            rope_parameters=ROPE,
        ),
        gpu=("vllm", "sglang"),
        by_stock=("sglang",),
        renamed={"layers.0.block_sparse_moe.": "layers.0.mlp."},
        replaced=dict(
            linear_attn_config=dict(
                full_attn_layers=[2],
                kda_layers=[1],
                num_heads=4,
                head_dim=128,
                short_conv_kernel_size=4,
            ),
            first_k_dense_replace=1,
            moe_layer_freq=1,
            moe_router_activation_func="sigmoid",
            moe_renormalize=True,
            use_grouped_topk=True,
            mla_use_nope=True,
        ),
    ),
    "Lfm2MoeForCausalLM": Family(
        dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
        {},
        RECURRENT,
        by_stock=("vllm",),
    ),
    "LongcatFlashForCausalLM": Family(
        MLA
        | dict(
            num_layers=2,
            num_hidden_layers=4,
            moe_topk=TOP_K,
            zero_expert_num=4,
            expert_ffn_hidden_size=32,
            ffn_hidden_size=64,
            routed_scaling_factor=2.5,
        ),
        CPU_MLA,
        untried=("sglang",),
        replaced=dict(
            mla_scale_q_lora=True,
            mla_scale_kv_lora=True,
            zero_expert_type="identity",
            max_position_embeddings=512,
        ),
        dropped=r"experts\.(8|9|10|11)\.",
    ),
    "MellumForCausalLM": Family(
        SLIDING | ROPE_BY_KIND | dict(mlp_layer_types=["sparse", "sparse"]), {}, {}
    ),
    "MiMoV2FlashForCausalLM": Family(
        SLIDING | DENSE_FIRST | ROPE_BY_KIND | dict(n_group=1, topk_group=1, v_head_dim=32),
        {},
        TRITON | overriding(rope_parameters=ROPE),
        by_stock=("vllm", "sglang"),
        replaced=dict(
            hybrid_layer_pattern=[1, 0],
            moe_layer_freq=[0, 1],
            layernorm_epsilon=1e-6,
            sliding_window_size=64,
            swa_head_dim=32,
            swa_v_head_dim=32,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            rope_theta=500000.0,
            swa_rope_theta=10000.0,
            partial_rotary_factor=1.0,
            add_swa_attention_sink_bias=True,
            scoring_func="sigmoid",
            topk_method="noaux_tc",
        ),
    ),
    "MiniMaxM2ForCausalLM": Family(
        {},
        {},
        {},
        replaced=dict(scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True),
        repeated=dict(rotary_dim="head_dim"),
    ),
    "Mistral4ForCausalLM": Family(
        MLA
        | ONE_GROUP
        | dict(
            first_k_dense_replace=1,
            head_dim=96,
            rope_parameters=MLA["rope_parameters"] | dict(llama_4_scaling_beta=0.1),
        ),
        untried=("vllm",),
    ),
    "NemotronHForCausalLM": Family(
        NEMOTRON_H,
        {},
        RECURRENT | {"moe_runner_backend": "triton"},
        cold_only=("vllm", "sglang"),
        mean=0.03,  # for SGLang, whose median is 0.002
        replaced=dict(
            hybrid_override_pattern="M*E",
            num_hidden_layers=3,
            layers_block_type=None,
            mtp_layers_block_type=None,
        ),
    ),
    "Qwen3_5MoeForCausalLM": Family(
        SHARED | LINEAR_ATTENTION,
        BFLOAT16,
        gpu=("sglang",),
        settings="Qwen3_5MoeTextConfig",
        median=0.03,
        mean=0.1,
    ),
    "SolarOpenForCausalLM": Family(
        ONE_GROUP | dict(first_k_dense_replace=0, routed_scaling_factor=1.0), {}, {}
    ),
}
