"""Tiny models of the classes that appeared in 2025 and 2026, text models first."""

from __future__ import annotations

from family_settings import (
    EXPERTS,
    GROUPS,
    LINEAR_ATTENTION,
    MLA,
    SHARED,
    TOP_K,
    VOCABULARY,
    Family,
)

# On CPUs with AMX, vLLM would select an attention backend without float32.
CPU_MLA = {"attention_backend": "CPU_MLA"}
DENSE_FIRST = dict(mlp_layer_types=["dense", "sparse"])
SLIDING = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=64)
ONE_GROUP = dict(n_group=1, topk_group=1, n_shared_experts=1, routed_scaling_factor=2.5)
ROPE_BY_KIND = dict(
    rope_parameters={
        kind: dict(rope_type="default", rope_theta=theta)
        for kind, theta in (("full_attention", 500000.0), ("sliding_attention", 10000.0))
    }
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
# Of images, for classes of Qwen's kind.
PATCHES = dict(
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
    image_token_id=130,
    video_token_id=131,
    vision_start_token_id=132,
    vision_end_token_id=133,
)
TEXT = ("text_config",)

FAMILIES_2026: dict[str, Family] = {
    "AfmoeForCausalLM": Family(
        SLIDING
        | dict(
            num_dense_layers=1, num_shared_experts=1, route_scale=2.5, global_attn_every_n_layers=2
        ),
        {},
        replaced=dict(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1),
    ),
    "AXK1ForCausalLM": Family(
        MLA | GROUPS | dict(topk_method="noaux_tc", scoring_func="sigmoid"), untried=("vllm",)
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
        {},
        replaced=dict(
            compress_ratios=[0, 0],
            num_hash_layers=1,
            topk_method="noaux_tc",
            layer_types=None,
            mlp_layer_types=None,
        ),
    ),
    "Dots1ForCausalLM": Family(
        ONE_GROUP | dict(first_k_dense_replace=1, layer_types=["full_attention"] * 2), {}, {}
    ),
    "FlexOlmoForCausalLM": Family({}, {}),
    "Gemma4ForCausalLM": Family(
        SLIDING
        | dict(
            enable_moe_block=True,
            top_k_experts=TOP_K,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=VOCABULARY,
            global_head_dim=32,
            per_layer_config={},
        ),
        {},
        settings="Gemma4TextConfig",
    ),
    "Glm4MoeLiteForCausalLM": Family(
        MLA | ONE_GROUP | DENSE_FIRST,
        CPU_MLA,
        untried=("sglang",),
        replaced=dict(first_k_dense_replace=1),
    ),
    "GraniteMoeSWAForCausalLM": Family(
        SLIDING | dict(shared_intermediate_size=64, layer_rope_theta=[10000.0, 10000.0]), {}
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
        wide=dict(mamba_n_heads=16),
        untried=("vllm", "sglang"),
    ),
    "HYV3ForCausalLM": Family(
        dict(num_shared_experts=1, router_scaling_factor=2.5) | DENSE_FIRST,
        {},
        {},
        replaced=dict(expert_hidden_dim=32, first_k_dense_replace=1, route_norm=True, qk_norm=True),
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        dict(moe_topk=TOP_K, num_shared_expert=1, use_mixed_mlp_moe=True),
        {},
        untried=("sglang",),
        replaced=dict(use_qk_norm=True),
    ),
    "LagunaForCausalLM": Family(
        SHARED | SLIDING | DENSE_FIRST | ROPE_BY_KIND | dict(num_attention_heads_per_layer=[4, 4]),
        sglang={},
        untried=("vllm",),
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
        untried=("vllm",),
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
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        ),
        untried=("vllm", "sglang"),
        renamed=("layers.0.block_sparse_moe.", "layers.0.mlp."),
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
            use_grouped_topk=True,
            mla_use_nope=True,
        ),
    ),
    "Lfm2MoeForCausalLM": Family(
        dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
        {},
        untried=("sglang",),
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
        untried=("vllm", "sglang"),
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
        untried=("sglang",),
        by_stock=("vllm",),
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
        untried=("vllm", "sglang"),
        replaced=dict(
            rotary_dim=32, scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True
        ),
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
    "Qwen3_5MoeForCausalLM": Family(
        SHARED | LINEAR_ATTENTION,
        {"dtype": "bfloat16"},
        untried=("sglang",),
        settings="Qwen3_5MoeTextConfig",
        median=0.03,
        mean=0.1,
    ),
    "SolarOpenForCausalLM": Family(
        ONE_GROUP | dict(first_k_dense_replace=0, routed_scaling_factor=1.0), {}, {}
    ),
    "ZayaForCausalLM": Family(
        dict(layer_types=["hybrid", "hybrid"], router_hidden_size=32, hidden_size=128),
        untried=("sglang",),
        top_k=1,
    ),
}

SEEING: dict[str, Family] = {
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
        untried=("vllm", "sglang"),
        inside=TEXT,
        around=dict(
            vision_config=dict(
                depth=1,
                hidden_size=64,
                embed_dim=64,
                intermediate_size=64,
                mlp_ratio=1,
                num_heads=2,
                patch_size=14,
            ),
            image_token_id=130,
            video_token_id=131,
            image_start_token_id=132,
            image_end_token_id=133,
            video_start_token_id=134,
            video_end_token_id=135,
        ),
    ),
    "Gemma4ForConditionalGeneration": Family(
        SLIDING
        | dict(
            enable_moe_block=True,
            top_k_experts=TOP_K,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=VOCABULARY,
            global_head_dim=32,
            per_layer_config={},
        ),
        {},
        inside=TEXT,
        around=dict(
            vision_config=dict(
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                head_dim=32,
                global_head_dim=32,
            ),
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
    "Glm4vMoeForConditionalGeneration": Family(
        GROUPS
        | dict(
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
        around=dict(
            vision_config=dict(
                depth=1,
                hidden_size=64,
                intermediate_size=64,
                num_heads=2,
                patch_size=14,
                image_size=56,
                out_hidden_size=128,
            ),
            image_token_id=130,
            video_token_id=131,
            image_start_token_id=132,
            image_end_token_id=133,
            video_start_token_id=134,
            video_end_token_id=135,
        ),
    ),
    "Llama4ForConditionalGeneration": Family(
        dict(
            intermediate_size_mlp=64,
            attention_chunk_size=128,
            layer_types=["chunked_attention", "full_attention"],
        ),
        {},
        untried=("sglang",),
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
        {"dtype": "bfloat16"},
        untried=("sglang",),
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
        untried=("vllm", "sglang"),
        published="KimiK25ForConditionalGeneration",
        settings="Kimi_K25Config",
        renamed=("language_model.model.blocks.", "language_model.model.layers."),
        inside=TEXT,
        around=dict(
            vision_config=dict(
                patch_size=14,
                pos_emb_height=8,
                pos_emb_width=8,
                num_attention_heads=2,
                num_hidden_layers=1,
                hidden_size=64,
                intermediate_size=64,
            ),
            projection_hidden_size=64,
            image_token_id=130,
            video_token_id=131,
            vision_start_token_id=132,
            vision_end_token_id=133,
        ),
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        MROPE, {}, {}, inside=TEXT, around=PATCHES, wide=WIDE_MROPE, transposed=True
    ),
}
