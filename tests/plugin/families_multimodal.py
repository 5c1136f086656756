"""Tiny models of multimodal classes. Their prompts are text."""

from __future__ import annotations

from families_2026 import (
    BFLOAT16,
    CPU_MLA,
    DENSE_FIRST,
    GEMMA4,
    ROPE,
    SLIDING,
    SLIDING_HEADS,
    TRITON,
    overriding,
)
from family_settings import (
    COMMON,
    EXPERTS,
    GROUPS,
    LINEAR_ATTENTION,
    LLAMA4,
    MLA,
    SHARED,
    TOP_K,
    VOCABULARY,
    Family,
)

MROPE = dict(
    rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, mrope_section=[8, 4, 4], mrope_interleaved=True
    )
)
WIDE_MROPE = dict(
    rope_parameters=dict(
        rope_type="default", rope_theta=10000.0, mrope_section=[24, 20, 20], mrope_interleaved=True
    )
)
# Tokens that stand for images and videos, and for their beginnings and ends.
VISION_TOKENS = dict(
    image_token_id=130, video_token_id=131, vision_start_token_id=132, vision_end_token_id=133
)
SPANS = dict(
    image_token_id=130,
    video_token_id=131,
    image_start_token_id=132,
    image_end_token_id=133,
    video_start_token_id=134,
    video_end_token_id=135,
)
# Of images, for classes of Qwen's kind.
PATCHES = VISION_TOKENS | dict(
    vision_config=dict(
        depth=2,
        hidden_size=64,
        intermediate_size=64,
        num_heads=2,
        patch_size=16,
        out_hidden_size=128,
        num_position_embeddings=64,
        deepstack_visual_indexes=[0],
        image_size=64,
        apply_vit_abs_pos_embed=True,
    ),
)
KIMI_VISION = dict(
    patch_size=14,
    pos_emb_height=8,
    pos_emb_width=8,
    num_attention_heads=2,
    num_hidden_layers=1,
    hidden_size=64,
    intermediate_size=64,
    # As SGLang reads them, and the text model's size, because it builds this part for text, too.
    vt_hidden_size=64,
    init_pos_emb_height=8,
    init_pos_emb_width=8,
)
STEP = (
    SLIDING
    | DENSE_FIRST
    | dict(
        share_expert_dim=32,
        moe_router_scaling_factor=2.5,
        num_sliding_attention_heads=4,
        rope_parameters=dict(
            full_attention=ROPE | dict(rope_theta=500000.0), sliding_attention=ROPE
        ),
    )
)
STEP_SETTINGS = dict(
    num_attention_groups=2,
    moe_num_experts=EXPERTS,
    moe_top_k=TOP_K,
    moe_layers_enum="1",
    use_head_wise_attn_gate=True,
    moe_router_activation="sigmoid",
    norm_expert_weight=True,
    use_moe_router_bias=True,
    need_fp32_gate=True,
    n_routed_experts=None,
    num_experts_per_tok=None,
    rope_theta=[10000.0, 500000.0],
    rope_parameters=None,
    per_layer_config=None,
    swiglu_limits=[0.0, 0.0],
    swiglu_limits_shared=[0.0, 0.0],
    partial_rotary_factors=[1.0, 1.0],
    yarn_only_types=[],
    attention_other_setting=dict(
        attention_type="sliding_attention",
        num_attention_heads=4,
        num_attention_groups=2,
        head_dim=32,
    ),
)
STEP_VLLM = {key: value for key, value in STEP_SETTINGS.items() if value is not None} | dict(
    att_impl_type="GQA", yarn_only_types=["none"], architectures=["Step3p5ForCausalLM"]
)
STEP_IMAGES = dict(width=64, layers=1, heads=2, image_size=56, patch_size=14, mlp_ratio=1.0)
IN_LANGUAGE_MODEL = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
TOWER = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
GEMMA4_TOWER = TOWER | dict(num_key_value_heads=2, head_dim=32, global_head_dim=32)
# MiniMax-M3's images, and what engines read and transformers does not write.
M3_VISION = TOWER | dict(
    image_size=56,
    patch_size=14,
    img_token_compression_config=dict(spatial_merge_size=2, temporal_patch_size=2),
    position_embedding_type="rope",
    rope_mode="3d",
    vision_segment_max_frames=4,
)
TEXT = ("text_config",)

MULTIMODAL: dict[str, Family] = {
    "Ernie4_5_VLMoeForConditionalGeneration": Family(
        dict(
            moe_intermediate_size=[32, 32],
            moe_num_experts=EXPERTS,
            moe_k=TOP_K,
            moe_num_shared_experts=1,
            use_bias=False,
            rope_parameters=dict(rope_type="default", rope_theta=500000.0, mrope_section=[6, 6, 4]),
        )
        | DENSE_FIRST,
        # As published, without a part for the text.
        {
            "hf_overrides": COMMON
            | dict(
                vocab_size=VOCABULARY + 16,
                moe_num_experts=[EXPERTS, EXPERTS],
                moe_intermediate_size=[32, 32],
                moe_k=TOP_K,
                moe_num_shared_experts=1,
                moe_layer_start_index=[1, 1],
                moe_layer_end_index=[1, 1],
                hidden_act="silu",
                rms_norm_eps=1e-5,
                rope_parameters=dict(rope_type="default", rope_theta=500000.0),
                freq_allocation=4,
                pixel_hidden_size=64,
                spatial_conv_size=2,
                temporal_conv_size=2,
                use_temporal_conv=False,
                im_patch_id=130,
            )
        },
        untried=("sglang",),
        unset="moe_statics",
        inside=TEXT,
        around=SPANS
        | dict(
            vision_config=dict(
                depth=1,
                hidden_size=64,
                embed_dim=64,
                intermediate_size=64,
                mlp_ratio=1,
                num_heads=2,
                patch_size=14,
            ),
        ),
    ),
    "Gemma4ForConditionalGeneration": Family(
        GEMMA4,
        {},
        TRITON | overriding(text_config=SLIDING_HEADS),
        by_stock=("sglang",),
        inside=TEXT,
        around=dict(
            vision_config=GEMMA4_TOWER,
            audio_config=None,
            image_token_id=130,
            video_token_id=131,
            audio_token_id=132,
            boi_token_id=133,
            eoi_token_id=134,
            boa_token_id=135,
            eoa_token_index=136,
        ),
    ),
    "DiffusionGemmaForBlockDiffusion": Family(
        GEMMA4 | dict(tie_word_embeddings=True),  # the encoder's weights are the decoder's
        untried=("vllm", "sglang"),
        settings="DiffusionGemmaConfig",
        inside=TEXT,
        around=dict(
            initializer_range=0.15,
            vision_config=GEMMA4_TOWER,
            image_token_id=130,
            boi_token_id=131,
            eoi_token_id=132,
        ),
    ),
    "Glm4vMoeForConditionalGeneration": Family(
        GROUPS
        | dict(
            head_dim=32,
            n_group=1,
            topk_group=1,
            partial_rotary_factor=0.5,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=10000.0,
                partial_rotary_factor=0.5,
                mrope_section=[2, 3, 3],
            ),
        ),
        {},
        {},
        replaced=dict(use_qk_norm=False),
        wide=dict(
            rope_parameters=dict(
                rope_type="default",
                rope_theta=10000.0,
                partial_rotary_factor=0.5,
                mrope_section=[8, 12, 12],
            )
        ),
        inside=TEXT,
        around=SPANS
        | dict(
            vision_config=dict(
                depth=1,
                hidden_size=64,
                intermediate_size=64,
                num_heads=2,
                patch_size=14,
                image_size=56,
                out_hidden_size=128,
            ),
        ),
    ),
    "Llama4ForConditionalGeneration": Family(
        LLAMA4,
        {},
        BFLOAT16,
        inside=TEXT,
        around=dict(
            vision_config=dict(
                hidden_size=64,
                intermediate_size=256,
                num_hidden_layers=1,
                num_attention_heads=2,
                image_size=56,
                patch_size=14,
                vision_output_dim=128,
                projector_input_dim=128,
                projector_output_dim=128,
            ),
            boi_token_index=132,
            eoi_token_index=133,
            image_token_index=130,
        ),
        top_k=1,
    ),
    "Qwen3_5MoeForConditionalGeneration": Family(
        SHARED | LINEAR_ATTENTION,
        BFLOAT16,
        gpu=("sglang",),
        inside=TEXT,
        around=PATCHES,
        median=0.03,
        mean=0.1,
    ),
    "Qwen3OmniMoeForConditionalGeneration": Family(
        MROPE,
        {},
        {},
        inside=("thinker_config", "text_config"),
        wide=WIDE_MROPE,
        around=dict(
            enable_audio_output=False,
            thinker_config=PATCHES
            | dict(
                audio_config=dict(
                    encoder_layers=1,
                    encoder_attention_heads=2,
                    encoder_ffn_dim=64,
                    d_model=64,
                    output_dim=128,
                    downsample_hidden_size=32,
                ),
                audio_token_id=139,
                audio_start_token_id=138,
                user_token_id=137,
            ),
        ),
    ),
    "Kimi_K25ForConditionalGeneration": Family(
        MLA | GROUPS | dict(topk_method="noaux_tc", scoring_func="sigmoid"),
        CPU_MLA,
        TRITON | overriding(vision_config=KIMI_VISION | dict(text_hidden_size=128)),
        published="KimiK25ForConditionalGeneration",
        settings="Kimi_K25Config",
        replaced=dict(architectures=["DeepseekV3ForCausalLM"]),
        renamed={
            "language_model.model.blocks.": "language_model.model.layers.",
            "model.mm_projector.": "mm_projector.",
            "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
        },
        inside=TEXT,
        around=VISION_TOKENS
        | dict(
            vision_config=KIMI_VISION | dict(text_hidden_size=512),
            projection_hidden_size=64,
        ),
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        MROPE | dict(norm_topk_prob=True),
        {},
        {},
        inside=TEXT,
        around=PATCHES,
        wide=WIDE_MROPE,
        transposed=True,
    ),
    "AriaForConditionalGeneration": Family(
        dict(
            moe_num_experts=EXPERTS,
            moe_topk=TOP_K,
            moe_num_shared_experts=2,
            model_type="aria_text",
        ),
        {},
        inside=TEXT,
        around=dict(
            vision_config=TOWER
            | dict(
                image_size=56,
                patch_size=14,
            ),
            image_token_index=130,
            projector_patch_to_query_dict={16: 4},
        ),
    ),
    "MiniMaxM3SparseForConditionalGeneration": Family(
        dict(
            mlp_layer_types=["sparse", "sparse"],
            layer_types=["full_attention", "full_attention"],
            dense_intermediate_size=64,
            shared_intermediate_size=32,
            rotary_dim=16,
        ),
        untried=("vllm", "sglang"),
        settings="MiniMaxM3VLConfig",
        replaced=dict(
            hidden_act="swigluoai",
            swiglu_beta=1.0,
            scoring_func="sigmoid",
            use_routing_bias=True,
            n_shared_experts=1,
            moe_layer_freq=[1, 1],
            use_gemma_norm=True,
            qk_norm_type="per_head",
            rope_theta=5000000,
            partial_rotary_factor=0.5,
        ),
        inside=TEXT,
        around=dict(
            vision_config=M3_VISION,
            projector_hidden_size=64,
            image_token_index=130,
            video_token_index=131,
        ),
    ),
    "Step3p7ForConditionalGeneration": Family(
        STEP,
        # Settings whose names transformers changes.
        {"hf_overrides": {"text_config": STEP_VLLM}},
        overriding(vision_config=STEP_IMAGES),
        replaced=STEP_SETTINGS,
        inside=TEXT,
        around=dict(
            vision_config=STEP_IMAGES | dict(max_position_embeddings=16), image_token_id=130
        ),
    ),
}
