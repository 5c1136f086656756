"""Tiny models of the classes that the engines serve; newer ones in families_2026."""

from __future__ import annotations

from dataclasses import replace

from families_2026 import BFLOAT16, CPU_MLA, FAMILIES_2026, TRITON, overriding
from families_alike import ALIKE
from families_layers import LAYERS_ALONE
from families_multimodal import MULTIMODAL
from families_sglang import SGLANG
from families_vllm_2026 import VLLM_2026
from families_wrapped import WRAPPED
from family_settings import (
    EXPERTS,
    GROUPS,
    LAYERS,
    LINEAR_ATTENTION,
    LLAMA4,
    MLA,
    SHARED,
    TOP_K,
    Family,
)

SHARED_FAMILIES = {**FAMILIES_2026, **MULTIMODAL, **ALIKE, **VLLM_2026}
# Of some classes, the tiny models of the engines differ.
IN_SGLANG = {
    f"{name} in SGLang" if name in SHARED_FAMILIES else name: replace(family, published=name)
    for name, family in (WRAPPED | LAYERS_ALONE | SGLANG).items()
}
FAMILIES = {
    **SHARED_FAMILIES,
    **IN_SGLANG,
    "DeepseekV2ForCausalLM": Family(
        MLA
        | GROUPS
        | dict(topk_method="group_limited_greedy", norm_topk_prob=False, scoring_func="softmax"),
        CPU_MLA,
        gpu=("sglang",),
    ),
    "DeepseekV3ForCausalLM": Family(  # Kimi-K2's class, too
        MLA | GROUPS | dict(topk_method="noaux_tc", scoring_func="sigmoid"),
        CPU_MLA,
        TRITON,
    ),
    "Cohere2MoeForCausalLM": Family(
        dict(layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=True), {}, {}
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        dict(
            moe_num_experts=EXPERTS, moe_k=TOP_K, moe_layer_start_index=1, moe_num_shared_experts=1
        ),
        {},
        {},
        unset="moe_statics",
    ),
    "ExaoneMoeForCausalLM": Family(
        GROUPS | dict(layer_types=["sliding_attention", "full_attention"], num_shared_experts=1),
        {},
        # SGLang's attention in Triton fails at sliding layers of this class.
        TRITON | overriding(layer_types=["full_attention"] * LAYERS),
        by_stock=("sglang",),
        published="ExaoneMoEForCausalLM",
        replaced=dict(is_moe_layer=[False, True]),
    ),
    "Glm4MoeForCausalLM": Family(GROUPS | dict(head_dim=32), {}, {}),
    "GptOssForCausalLM": Family(
        dict(layer_types=["sliding_attention", "full_attention"], swiglu_limit=7.0),
        {},
        TRITON | overriding(dtype=None),
    ),
    "GraniteMoeForCausalLM": Family({}, {}, {}),
    "GraniteMoeSharedForCausalLM": Family(dict(shared_intermediate_size=64), {}, {}),
    "Llama4ForCausalLM": Family(
        LLAMA4,
        {},
        settings="Llama4TextConfig",
        top_k=1,
    ),
    "MixtralForCausalLM": Family({}, {}, {}),
    "OlmoeForCausalLM": Family(dict(num_key_value_heads=4, norm_topk_prob=False), {}, {}),
    "PhimoeForCausalLM": Family(
        dict(lm_head_bias=True, attention_bias=True),
        {},
        {},
        published="PhiMoEForCausalLM",
        unset="lm_head.bias",
    ),
    "Qwen2MoeForCausalLM": Family(SHARED, {}, {}),
    "Qwen3MoeForCausalLM": Family({}, {}, {}),
    # vLLM's linear attention on the CPU supports only BF16.
    "Qwen3NextForCausalLM": Family(
        SHARED | LINEAR_ATTENTION, BFLOAT16, gpu=("sglang",), median=0.03, mean=0.06
    ),
}
