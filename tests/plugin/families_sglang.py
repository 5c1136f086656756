"""Tiny models of classes that SGLang alone serves, or that are another model in SGLang."""

from __future__ import annotations

from dataclasses import replace

from families_2026 import RECURRENT, ROPE, TRITON, overriding
from families_layers import NO_ATTENTION
from families_multimodal import KIMI_VISION, MULTIMODAL
from families_vllm_2026 import VLLM_2026
from family_settings import EXPERTS, TOP_K, Family

GROK = Family(
    dict(
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        moe_intermediate_size=32,
        intermediate_size=64,
        hidden_activation="gelu",
        query_pre_attn_scalar=32,
        layer_types=["full_attention", "full_attention"],
        attn_logit_softcapping=30.0,
        final_logit_softcapping=50.0,
        rope_parameters=ROPE,
    ),
    sglang=TRITON,
    like="Grok1ForCausalLM",
    settings="Gemma2Config",
    replaced=dict(
        model_type="git",  # as published
        residual_moe=True,
        embedding_multiplier_scale=128**0.5,
        output_multiplier_scale=1.0,
        router_logit_softcapping=30.0,
        attn_temperature_len=1024,
        rope_theta=10000.0,
    ),
    renamed={
        "input_layernorm": "pre_attn_norm",
        "post_attention_layernorm": "post_attn_norm",
        "pre_feedforward_layernorm": "pre_moe_norm",
        "post_feedforward_layernorm": "post_moe_norm",
        "mlp.dense.": "mlp.",
        "mlp.block_sparse_moe.": "block_sparse_moe.",
    },
    parted="numbers",
)
# Of Zaya's layers, the first half of each is a layer of its own as published.
ZAYA_LAYERS = {
    "model.input_hidden_states_": "model.layers.0.res_scale.hidden_states_",
    "layers.1.post_mlp_residual_scale": "res_scale",
    "layers.1.mlp.": "layers.3.zaya_block.",
    "layers.1.post_attention_layernorm": "layers.3.input_norm",
    "layers.1.post_attention_residual_scale": "layers.3.res_scale",
    "layers.1.input_layernorm": "layers.2.input_norm",
    "layers.1.self_attn.": "layers.2.self_attn.",
    "layers.0.post_mlp_residual_scale": "layers.2.res_scale",
    "layers.0.mlp.": "layers.1.zaya_block.",
    "layers.0.post_attention_layernorm": "layers.1.input_norm",
    "layers.0.post_attention_residual_scale": "layers.1.res_scale",
    "layers.0.input_layernorm": "layers.0.input_norm",
    "model.norm.": "model.final_norm.",
}
ZAYA = Family(
    dict(
        layer_types=["hybrid", "hybrid"],
        router_hidden_size=32,
        rope_parameters=dict(hybrid=ROPE | dict(partial_rotary_factor=0.5)),
    ),
    sglang=RECURRENT,
    like="ZayaForCausalLM",
    top_k=1,
    unset="bias",
    replaced=dict(
        num_hidden_layers=4,
        layer_types=None,
        num_query_groups=2,
        ffn_hidden_size=64,
        zaya_mlp_expansion=32,
        moe_router_topk=1,
        zaya_use_mod=True,
        norm_epsilon=1e-5,
        rope_parameters=None,
        rope_theta=10000.0,
    ),
    renamed=ZAYA_LAYERS
    | {
        "qkv_proj.q_proj": "qkv.linear_q",
        "qkv_proj.k_proj": "qkv.linear_k",
        "qkv_proj.v_proj_current": "qkv.val_proj1",
        "qkv_proj.v_proj_delayed": "qkv.val_proj2",
        "qkv_proj.conv_qk_depthwise": "qkv.conv_qk.0",
        "qkv_proj.conv_qk_grouped": "qkv.conv_qk.1",
        "qk_norm.temp": "qkv.temp",
        "zaya_block.gate.": "zaya_block.router.",
        "router_mlp.norm": "rmsnorm_eda",
        "router_mlp.fc1": "router_mlp.0",
        "router_mlp.fc2": "router_mlp.2",
        "router_mlp.out_proj": "router_mlp.4",
        "zaya_block.experts.": "zaya_block.experts.local_experts.",
    },
    parted="linear",
)
INKLING = VLLM_2026["InklingForConditionalGeneration"]
ERNIE_VL = MULTIMODAL["Ernie4_5_VLMoeForConditionalGeneration"]
assert ERNIE_VL.vllm is not None
KIMI_K3 = VLLM_2026["KimiK3ForConditionalGeneration"]
SGLANG: dict[str, Family] = {
    "Dots3NoteForCausalLM": replace(
        VLLM_2026["Dots3NoteForCausalLM"],
        untried=("sglang",),
        replaced=VLLM_2026["Dots3NoteForCausalLM"].replaced | dict(sliding_window_size=64),
        dropped=NO_ATTENTION,
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": replace(
        ERNIE_VL,
        vllm=None,
        sglang=overriding(**ERNIE_VL.vllm["hf_overrides"], vision_config=dict(in_chans=3)),
        untried=(),
        like="Ernie4_5_VLMoeForConditionalGeneration",
    ),
    "Grok1ForCausalLM": GROK,
    "Grok1ModelForCausalLM": GROK,
    "InklingForConditionalGeneration": replace(
        INKLING,
        untried=("sglang",),
        replaced=INKLING.replaced | dict(local_layer_ids=[], dense_mlp_idx=-1),
    ),
    "KimiK3ForConditionalGeneration": replace(
        KIMI_K3,
        like="KimiK3ForConditionalGeneration",
        wrapped=KIMI_K3.wrapped | dict(vision_config=KIMI_VISION),
    ),
    "ZayaForCausalLM": ZAYA,
}
