"""Tiny models of classes that transformers does not know. Each computes what another one does,
which is the reference and gives the weights, under other names.

Their config.json has the other class's model_type, because the engines read a published one with
code of its repository.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from families_2026 import CPU_MLA, FAMILIES_2026, ONE_GROUP, ROPE, TRITON, overriding
from families_multimodal import MULTIMODAL
from family_settings import EXPERTS, GROUPS, MLA, Family

QUERY_KEY_VALUE = {"query_key_value": ("q_proj", "k_proj", "v_proj")}
# Of Ling, by the names of GLM-4.5 and Qwen3-MoE.
LING_NAMES = {
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "self_attn.": "attention.",
    "embed_tokens": "word_embeddings",
    "gate.e_score_correction_bias": "gate.expert_bias",
}
LING = dict(
    use_bias=False,
    use_qkv_bias=False,
    use_qk_norm=True,
    use_rmsnorm=True,
    embedding_dropout=0.0,
    rotary_dim=16,
    head_dim=32,
    num_experts=EXPERTS,
)
LING_WIDE = dict(rotary_dim=64)  # of GLM-4's heads, half
BIASED = dict(num_shared_experts=1, score_function="sigmoid", moe_router_enable_expert_bias=True)
# Of Mistral's own files, by the names of DeepSeek-V2. The order matters.
MISTRAL_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.layers.": "layers.",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.o_proj": "attention.wo",
    ".mlp.experts.": ".experts.",
    ".mlp.shared_experts.": ".shared_experts.",
    ".mlp.gate.": ".gate.",
    ".mlp.": ".feed_forward.",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}
# As published; transformers has another name for it.
SCALED_ROPE = dict(
    rope_parameters=MLA["rope_parameters"] | dict(rope_type="deepseek_yarn", type="deepseek_yarn")
)
SIGMOID_MLA: dict[str, Any] = MLA | ONE_GROUP | dict(first_k_dense_replace=1)

LING_1 = Family(
    {},
    {},
    {},
    like="Qwen3MoeForCausalLM",
    replaced=LING | dict(rotary_dim=32, num_shared_experts=0, first_k_dense_replace=0),
    renamed=LING_NAMES,
    joined=QUERY_KEY_VALUE,
    wide=dict(rotary_dim=128),
)

ALIKE: dict[str, Family] = {
    "BailingMoeForCausalLM": LING_1,
    "BailingMoEForCausalLM": replace(LING_1, vllm=None),
    "BailingMoeV2ForCausalLM": Family(
        GROUPS | dict(use_qk_norm=True),
        {},
        {},
        wide=LING_WIDE,
        by_stock=("sglang",),  # it leaves routed_scaling_factor to its kernels for GPUs
        like="Glm4MoeForCausalLM",
        replaced=LING | BIASED,
        renamed=LING_NAMES,
        joined=QUERY_KEY_VALUE,
    ),
    "SarvamMoEForCausalLM": Family(
        ONE_GROUP
        | dict(use_qk_norm=True, first_k_dense_replace=1, routed_scaling_factor=1.0),  # see above
        {},
        {},
        wide=LING_WIDE,
        like="Glm4MoeForCausalLM",
        replaced=LING | BIASED,
        renamed=LING_NAMES,
        joined=QUERY_KEY_VALUE,
    ),
    "SarvamMLAForCausalLM": Family(
        SIGMOID_MLA | dict(q_lora_rank=None, routed_scaling_factor=1.0),
        CPU_MLA | {"hf_overrides": SCALED_ROPE},
        TRITON | overriding(**SCALED_ROPE),
        like="DeepseekV3ForCausalLM",
        replaced=BIASED | dict(num_experts=EXPERTS),
    ),
    "Param2MoEForCausalLM": Family(
        GROUPS | dict(use_qk_norm=True, partial_rotary_factor=1.0),
        {"hf_overrides": dict(rope_theta=10000.0, rope_scaling=None)},
        wide=LING_WIDE,
        like="Glm4MoeForCausalLM",
        replaced=LING | BIASED,
        renamed=LING_NAMES,
        joined=QUERY_KEY_VALUE,
    ),
    # DeepSeek-MoE, of 2024.
    "DeepseekForCausalLM": Family(
        dict(shared_intermediate_size=64, attention_multiplier=32**-0.5),
        {},
        wide=dict(shared_intermediate_size=256, attention_multiplier=128**-0.5),
        like="GraniteMoeSharedForCausalLM",
        replaced=dict(
            n_routed_experts=EXPERTS,
            n_shared_experts=2,
            moe_intermediate_size=32,
            first_k_dense_replace=0,
            norm_topk_prob=True,
            scoring_func="softmax",
        ),
        renamed={
            "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
            "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
            "block_sparse_moe.router.layer.": "mlp.gate.",
            "shared_mlp.input_linear.": "mlp.shared_experts.gate_up_proj.",
            "shared_mlp.output_linear.": "mlp.shared_experts.down_proj.",
        },
        parted="experts",
    ),
    "MistralLarge3ForCausalLM": Family(
        MLA | ONE_GROUP | dict(first_k_dense_replace=1, topk_method="greedy", norm_topk_prob=False),
        CPU_MLA,
        TRITON,
        like="DeepseekV2ForCausalLM",
        replaced=dict(moe_layer_freq=1, scoring_func="softmax"),
        renamed=MISTRAL_NAMES,
    ),
    "MiMoV2ForCausalLM": replace(
        FAMILIES_2026["MiMoV2FlashForCausalLM"],
        like="MiMoV2FlashForCausalLM",
        joined={"qkv_proj": ("q_proj", "k_proj", "v_proj")},
    ),
    "NemotronHPuzzleForCausalLM": replace(
        FAMILIES_2026["NemotronHForCausalLM"], like="NemotronHForCausalLM"
    ),
    "PanguUltraMoEForCausalLM": Family(
        SIGMOID_MLA | dict(rope_parameters=ROPE),
        CPU_MLA,
        like="DeepseekV3ForCausalLM",
        replaced=dict(router_enable_expert_bias=True, sandwich_norm=False),
        renamed={"gate.e_score": "e_score"},
    ),
    "PanguProMoEV2ForCausalLM": Family(
        ONE_GROUP | dict(first_k_dense_replace=1),
        {},
        like="Glm4MoeForCausalLM",
        replaced=dict(router_enable_expert_bias=True),
        renamed={"gate.e_score": "e_score"},
    ),
    "Step3p5ForCausalLM": replace(
        MULTIMODAL["Step3p7ForConditionalGeneration"],
        vllm={},
        sglang={},
        like="Step3p7ForConditionalGeneration",
        dropped="vision|vit_large",
        text_only=True,
    ),
    "InternS2PreviewForConditionalGeneration": replace(
        MULTIMODAL["Qwen3_5MoeForConditionalGeneration"], like="Qwen3_5MoeForConditionalGeneration"
    ),
    # These diffuse blocks of text, so their MoE layers alone are compared.
    "LLaDA2MoeModelLM": Family(
        GROUPS | dict(use_qk_norm=True, routed_scaling_factor=1.0),
        untried=("sglang",),
        like="Glm4MoeForCausalLM",
        replaced=LING | BIASED,
        renamed=LING_NAMES,
        joined=QUERY_KEY_VALUE,
    ),
    "SDARMoeForCausalLM": Family({}, untried=("sglang",), like="Qwen3MoeForCausalLM"),
    "MiniMaxM3SparseForCausalLM": replace(
        MULTIMODAL["MiniMaxM3SparseForConditionalGeneration"],
        like="MiniMaxM3SparseForConditionalGeneration",
        dropped="vision|projector|patch_merge",
        renamed={"language_model.": ""},
        text_only=True,
    ),
}
