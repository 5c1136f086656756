"""Tiny models of further classes of vLLM, most of them around a text model of another class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from families_2026 import CPU_MLA, DENSE_FIRST, FAMILIES_2026, GEMMA4, ONE_GROUP, ROPE
from families_alike import ALIKE
from families_multimodal import IN_LANGUAGE_MODEL, MULTIMODAL, PATCHES, TEXT, TOWER
from family_settings import (
    EXPERTS,
    GROUPS,
    LINEAR_ATTENTION,
    MLA,
    NEMOTRON_H,
    NO_MEDIA,
    SHARED,
    TOP_K,
    Family,
)

MINICPM_VISION: dict[str, Any] = dict(
    vision_config=TOWER
    | dict(num_hidden_layers=2, image_size=56, patch_size=14, insert_layer_id=0),
    insert_layer_id=0,
    image_size=56,
    image_token_id=130,
    video_token_id=131,
)
MINICPM = Family(
    SHARED | LINEAR_ATTENTION | dict(model_type="qwen3_5_moe_text"),
    {"dtype": "bfloat16"},
    inside=TEXT,
    around=MINICPM_VISION,
    median=0.03,
    mean=0.1,
)
NEMOTRON_OMNI = Family(
    NEMOTRON_H | dict(architectures=["NemotronHForCausalLM"]),
    # As published; transformers has another name for it.
    {"skip_tokenizer_init": False, "hf_overrides": {"vit_hidden_size": 64}},
    cold_only=("vllm",),
    tokenizer=True,
    replaced=dict(dtype="bfloat16"),
    settings="NemotronH_Omni_Reasoning_V3_Config",
    like="NemotronH_Omni_Reasoning_V3",
    inside=TEXT,
    around=dict(
        vision_config=TOWER
        | dict(
            image_size=32,
            patch_size=16,
            video_temporal_patch_size=2,
            args=dict(model="vit_base_patch16_224"),
        ),
        vision_hidden_size=64,
        projector_hidden_size=64,
        force_image_size=32,
        patch_size=16,
        image_token_id=130,
        video_token_id=131,
        template="none",
        ps_version="v2",
        image_tag_type="internvl",
        norm_mean=[0.5, 0.5, 0.5],
        norm_std=[0.5, 0.5, 0.5],
    ),
)

LING_2_5 = replace(
    ALIKE["BailingMoeV2ForCausalLM"],
    vllm=None,
    sglang=None,
    by_stock=(),
    untried=("vllm",),
    replaced=ALIKE["BailingMoeV2ForCausalLM"].replaced
    | dict(
        layer_group_size=2,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        num_experts=EXPERTS,
        moe_shared_expert_intermediate_size=32,
    ),
)
GLM_4V = replace(
    MULTIMODAL["Glm4vMoeForConditionalGeneration"],
    sglang=None,
    like="Glm4vMoeForConditionalGeneration",
)
GLM_5_NEXT = Family(
    MLA
    | ONE_GROUP
    | DENSE_FIRST
    | dict(
        qk_rope_head_dim=0,
        head_dim=0,
        layer_types=["linear_attention", "full_attention"],
        linear_num_heads=4,
        linear_head_dim=128,
        index_n_heads=4,
        hc_mult=2,
        swiglu_limit=1.5,
        rope_parameters=ROPE,
    ),
    untried=("vllm",),
    settings="Glm5NextConfig",
    replaced=dict(mhc=True, topk_method="noaux_tc", scoring_func="sigmoid", mla_use_nope=True),
    inside=TEXT,
    around=GLM_4V.around
    | dict(vision_config=GLM_4V.around["vision_config"] | dict(projection_intermediate_size=64)),
)
DEEPSEEK_4 = FAMILIES_2026["DeepseekV4ForCausalLM"]
INKLING = Family(
    dict(
        n_shared_experts=2,
        route_scale=2.5,
        layer_types=["hybrid", "hybrid"],
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=32,
    ),
    untried=("vllm",),
    settings="InklingTextConfig",
    replaced=dict(
        model_type="inkling_model",
        local_layer_ids=[],
        use_embed_norm=True,
        use_gate_bias=True,
        use_global_scale=True,
    ),
    renamed={
        "model.embed_tokens.embed_norm.": "model.llm.embed_norm.",
        "model.embed_tokens.": "model.llm.embed.",
        "model.layers.": "model.llm.layers.",
        "model.norm.": "model.llm.norm.",
        "lm_head.": "model.llm.unembed.",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
        "gate.e_score_correction_bias": "gate.bias",
        "mlp.experts.gate_up_proj": "mlp.experts.w13_weight",
        "mlp.experts.down_proj": "mlp.experts.w2_weight",
        "shared_experts.down_proj": "shared_experts.shared_w2_weight",
        # For `joined`, which finds parts of names between dots.
        "shared_experts.gate_proj": "shared_experts.gate_proj.",
        "shared_experts.up_proj": "shared_experts.up_proj.",
    },
    joined={"shared_w13_weight": ("gate_proj", "up_proj")},
    interleaved=("w13_weight",),
)
HY_4 = FAMILIES_2026["HYV4ForCausalLM"]
NO_ROTATION = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=1e9,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=1,
)
# The index of sparse attention, which sees all tokens, is in transformers' model only.
INDEX = dict(n_heads=2, kv_heads=1, head_dim=64, budget=256, compress_ratio=4)
QWEN_4 = Family(
    SHARED
    | LINEAR_ATTENTION
    | dict(hc_count=2, hc_lowrank=16, output_gate_type="silu")
    | {f"indexer_{name}": value for name, value in INDEX.items()},
    {"dtype": "bfloat16"},
    settings="Qwen4ExpTextConfig",
    replaced={f"indexer_{name}": None for name in INDEX},
    dropped=r"\.indexer\.",
    median=0.03,
    mean=0.1,
)
KIMI_LINEAR = FAMILIES_2026["KimiLinearForCausalLM"]

VLLM_2026: dict[str, Family] = {
    "Step3TextForCausalLM": Family(
        dict(
            num_key_value_heads=1,
            shared_intermediate_size=64,
            attention_multiplier=32**-0.5,
            share_q_dim=64,
        ),
        {},
        settings="GraniteMoeSharedConfig",
        wide=dict(attention_multiplier=128**-0.5),
        replaced=dict(
            model_type="step3_text",
            num_local_experts=None,
            num_experts_per_tok=None,
            moe_num_experts=EXPERTS,
            moe_top_k=TOP_K,
            moe_intermediate_size=32,
            head_dim=32,
            moe_layers_enum="0,1",
            norm_expert_weight=True,
            share_expert_dim=64,
            max_position_embedding=512,
            rope_parameters=ROPE,
        ),
        renamed={
            "self_attn.q_proj.0.": "self_attn.q_proj.",
            "self_attn.q_proj.1.": "self_attn.inter_norm.",
            "self_attn.q_proj.2.": "self_attn.wq.",
            "block_sparse_moe.input_linear.": "moe.gate_up_proj.",
            "block_sparse_moe.output_linear.": "moe.down_proj.",
            "block_sparse_moe.router.layer.": "moe.gate.",
            "shared_mlp.input_linear.": "share_expert.gate_up_proj.",
            "shared_mlp.output_linear.": "share_expert.down_proj.",
        },
        parted="stacks",
    ),
    "InternS1ProForConditionalGeneration": replace(
        MULTIMODAL["Qwen3VLMoeForConditionalGeneration"],
        config=MULTIMODAL["Qwen3VLMoeForConditionalGeneration"].config | dict(router_n_groups=2),
        sglang=None,
        transposed=False,
        settings="Qwen3VLMoeConfig",
        replaced=dict(
            rope_parameters=ROPE | dict(fope_init_factor=0.5, fope_sep_head=True, num_inv_freq=16)
        ),
    ),
    "MiMoV2OmniForCausalLM": replace(
        ALIKE["MiMoV2ForCausalLM"],
        vllm={"limit_mm_per_prompt": NO_MEDIA},
        sglang=None,
        replaced=ALIKE["MiMoV2ForCausalLM"].replaced
        | dict(
            vision_config=dict(
                depth=1,
                hidden_size=64,
                intermediate_size=64,
                num_heads=2,
                out_hidden_size=128,
                num_key_value_heads=2,
                use_sink=False,
            ),
            audio_config=None,
        ),
    ),
    "MiniCPMV4_6ForConditionalGeneration": MINICPM,
    "MiniCPMV4_7ForConditionalGeneration": MINICPM,
    "Gemma4UnifiedForConditionalGeneration": Family(
        GEMMA4 | dict(num_experts=EXPERTS, moe_intermediate_size=32),
        {},
        inside=TEXT,
        around=MULTIMODAL["Gemma4ForConditionalGeneration"].around
        | dict(vision_config=dict(mm_embed_dim=64, patch_size=16)),
    ),
    "K2HorizonForCausalLM": Family(
        ONE_GROUP | dict(first_k_dense_replace=1, use_qk_norm=False, partial_rotary_factor=1.0),
        {"hf_overrides": {"attention_gate_func": None}},  # published, and not an absent setting
        like="Glm4MoeForCausalLM",
        renamed={"gate.e_score_correction_bias": "gate.bias"},
        replaced=dict(
            rope_head_dim=32,
            query_key_norm=False,
            layernorm_num_groups=1,
            mova_num_experts=0,
            moe_gate_bias=True,
            router_score_func="sigmoid",
            router_scaling_factor=2.5,
            num_shared_experts=1,
            mlp_only_layers=[0],
            decoder_sparse_step=1,
            num_experts=EXPERTS,
            head_dim=32,
        ),
    ),
    "InternS2MobiusForConditionalGeneration": replace(
        MULTIMODAL["Qwen3_5MoeForConditionalGeneration"],
        config=SHARED | LINEAR_ATTENTION | dict(num_blocks=1, num_key_value_heads=1),
        settings="Qwen3_5MoeConfig",
        gpu=(),
    ),
    "NemotronH_Nano_VL_V2": NEMOTRON_OMNI,
    "NemotronH_Nano_Omni_Reasoning_V3": NEMOTRON_OMNI,
    "NemotronH_Omni_Reasoning_V3": NEMOTRON_OMNI,
    "NemotronH_Super_Omni_Reasoning_V3": NEMOTRON_OMNI,
    "OpenPanguVLForConditionalGeneration": replace(
        ALIKE["PanguProMoEV2ForCausalLM"],
        vllm={"limit_mm_per_prompt": NO_MEDIA},
        replaced=ALIKE["PanguProMoEV2ForCausalLM"].replaced
        | dict(vision_config=TOWER | dict(out_hidden_size=128)),
    ),
    # Their published models have no experts; their code builds them if the configuration has some.
    "PanguEmbeddedForCausalLM": ALIKE["PanguProMoEV2ForCausalLM"],
    "Qwen3_5ForCausalLM": replace(
        FAMILIES_2026["Qwen3_5MoeForCausalLM"], like="Qwen3_5MoeForCausalLM"
    ),
    "Qwen3_5ForConditionalGeneration": replace(
        MULTIMODAL["Qwen3_5MoeForConditionalGeneration"], like="Qwen3_5MoeForConditionalGeneration"
    ),
    "Glm4vForConditionalGeneration": GLM_4V,
    "GlmOcrForConditionalGeneration": GLM_4V,
    "KimiVLForConditionalGeneration": Family(
        MLA | GROUPS | dict(topk_method="noaux_tc", scoring_func="sigmoid"),
        CPU_MLA,
        like="DeepseekV3ForCausalLM",
        renamed=IN_LANGUAGE_MODEL,
        wrapped=dict(
            model_type="kimi_vl",
            text_config=None,
            vision_config=TOWER,
        ),
    ),
    "Qwen4ExpForCausalLM": QWEN_4,
    "Qwen4ExpForConditionalGeneration": replace(
        QWEN_4, settings="Qwen4ExpConfig", inside=TEXT, around=PATCHES
    ),
    # Without sparse attention and sinks, and with positions that rotate nothing: vLLM rotates pairs
    # of other dimensions than transformers.
    "HYV4ForCausalLM in vLLM": replace(
        HY_4,
        config=HY_4.config
        | dict(
            swiglu_limit=1.5,
            learnable_sink_init=-1e9,
            rope_parameters=NO_ROTATION,
        ),
        vllm=CPU_MLA,
        untried=(),
        cold_only=("vllm",),
        published="HYV4ForCausalLM",
        like="HYV4ForCausalLM",
        replaced=HY_4.replaced | dict(layer_types=["full_attention"] * 2, learnable_sink=False),
        dropped="indexer|learnable_sink",
        renamed=HY_4.renamed
        | {
            ".hc_pre.hc_attn_layer.": ".hc_attn_layer.hc_pre.",
            ".hc_pre.hc_mlp_layer.": ".hc_mlp_layer.hc_pre.",
            ".hc_pre.hc_head.": ".hc_head.",
        },
    ),
    # Only their MoE layers are compared.
    "ClefOmniForJointSchema": replace(
        MULTIMODAL["Qwen3OmniMoeForConditionalGeneration"],
        vllm=None,
        sglang=None,
        untried=("vllm",),
        settings="Qwen3OmniMoeConfig",
        like="Qwen3OmniMoeForConditionalGeneration",
    ),
    "DeepseekV41ForCausalLM": replace(
        DEEPSEEK_4,
        config=DEEPSEEK_4.config | dict(mlp_layer_types=["moe", "moe"], swiglu_limit=1.5),
        like="DeepseekV4ForCausalLM",
        dropped="hc_head",
        renamed={"model.": "", "embed_tokens.": "embed.", "lm_head.": "head."},
        replaced=DEEPSEEK_4.replaced | dict(num_hash_layers=0, kv_source_layer_ids=[1]),
        wrapped=dict(model_type="deepseek_v41", text_config=None, vision_config={}),
        added={f"image_{part}": (128,) for part in ("start", "end", "newline")},
    ),
    "Dots3NoteForCausalLM": Family(
        MLA | ONE_GROUP | dict(first_k_dense_replace=1),
        untried=("vllm",),
        like="DeepseekV3ForCausalLM",
        replaced=dict(
            model_type="dots3_note",
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            moe_layer_freq=1,
            layer_types=["full_attention", "sliding_attention"],
            index_topk=16,
        ),
    ),
    "InklingForCausalLM": INKLING,
    "InklingForConditionalGeneration": replace(
        INKLING,
        like="InklingForCausalLM",
        wrapped=dict(
            model_type="inkling_mm_model", text_config=None, vision_config={}, audio_config={}
        ),
    ),
    "LongcatFlashNgramForCausalLM": replace(
        FAMILIES_2026["LongcatFlashForCausalLM"],
        vllm=None,
        untried=("vllm",),
        settings="LongcatFlashConfig",
        like="LongcatFlashForCausalLM",
    ),
    "BailingMoeV2_5ForCausalLM": LING_2_5,
    "BailingMoeV3ForCausalLM": LING_2_5,
    "BailingMoeV3VLForConditionalGeneration": replace(
        LING_2_5,
        wrapped=dict(
            model_type="bailing_moe_v3_vl",
            text_config=None,
            vision_config=dict(
                depth=1, hidden_size=64, intermediate_size=64, num_heads=2, out_hidden_size=128
            ),
        ),
    ),
    "Glm5NextForCausalLM": replace(
        GLM_5_NEXT,
        like="Glm5NextForConditionalGeneration",
        dropped="visual",
        renamed={"model.language_model.": "model."},
        text_only=True,
    ),
    "Glm5NextForConditionalGeneration": GLM_5_NEXT,
    "KimiK3ForConditionalGeneration": replace(
        KIMI_LINEAR,
        config=KIMI_LINEAR.config
        | dict(
            routed_expert_hidden_size=64,
            activation_situ_beta=1.5,
            activation_situ_linear_beta=2.0,
        ),
        gpu=(),
        by_stock=(),
        settings="KimiLinearConfig",
        renamed=KIMI_LINEAR.renamed | IN_LANGUAGE_MODEL,
        replaced=KIMI_LINEAR.replaced
        | dict(
            hidden_act="situ",
            latent_moe_use_norm=True,
            num_experts=EXPERTS,
        ),
        wrapped=dict(
            model_type="kimi_k3",
            text_config=None,
            vision_config=dict(
                vt_num_attention_heads=2,
                vt_num_hidden_layers=1,
                vt_hidden_size=64,
                vt_intermediate_size=64,
                qkv_hidden_size=64,
            ),
        ),
    ),
}
