"""Tiny models of classes of 2026 whose MoE layers alone are compared in SGLang: their attention is
for GPUs, and has no weights here. Each has the MoE layer of another class.
"""

from __future__ import annotations

from dataclasses import replace

from families_2026 import FAMILIES_2026, TRITON
from families_alike import ALIKE, BIASED, LING, LING_NAMES, SCALED_ROPE
from families_multimodal import PATCHES, TEXT, TOWER
from families_vllm_2026 import VLLM_2026
from family_settings import EXPERTS, GROUPS, LAYERS, LINEAR_ATTENTION, MLA, SHARED, Family

NO_ATTENTION = r"self_attn|linear_attn"
# SGLang knows no other MLA on the CPU.
YARN = SCALED_ROPE["rope_parameters"]
# Of Ling 2.5 and 3: which layers have linear attention, and the sizes of the others.
HYBRID = {
    name: MLA[name] for name in MLA if name.endswith("_dim") or name.endswith("_rank")
} | dict(
    model_type="bailing_hybrid",
    layer_group_size=2,
    group_norm_size=1,
    num_key_value_heads=4,
    rope_theta=10000.0,
    rope_parameters=YARN,
    rope_scaling=YARN,
)
LING_2_5 = Family(
    GROUPS
    | dict(use_qk_norm=True, routed_scaling_factor=1.0),  # which SGLang leaves to its kernels
    untried=("sglang",),
    like="Glm4MoeForCausalLM",
    replaced=LING | BIASED | HYBRID,
    renamed={name: LING_NAMES[name] for name in ("embed_tokens", "gate.e_score_correction_bias")},
    dropped=NO_ATTENTION,
)
MINICPM = Family(
    SHARED | LINEAR_ATTENTION,
    untried=("sglang",),
    like="Qwen3_5MoeForCausalLM",
    settings="Qwen3_5MoeTextConfig",
    renamed={"model.": "model.language_model."},
    dropped=NO_ATTENTION,
    wrapped=dict(
        model_type="minicpmv4_6",
        text_config=None,
        vision_config=TOWER | dict(image_size=56, patch_size=14, insert_layer_id=0),
    ),
)
QWEN_VISION = dict(
    depth=1,
    hidden_size=64,
    intermediate_size=64,
    num_heads=2,
    patch_size=16,
    out_hidden_size=128,
    num_position_embeddings=64,
)
# Its tensors, and those between it and the text model.
QWEN_TOWER: dict[str, tuple[int, ...]] = {
    "visual.patch_embed.proj": (64, 3, 2, 16, 16),
    "visual.blocks.0.norm1": (64,),
    "visual.blocks.0.norm2": (64,),
    "visual.blocks.0.attn.qkv": (192, 64),
    "visual.blocks.0.attn.proj": (64, 64),
    "visual.blocks.0.mlp.linear_fc1": (64, 64),
    "visual.blocks.0.mlp.linear_fc2": (64, 64),
    "visual.merger.norm": (64,),
    "visual.merger.linear_fc1": (256, 256),
    "visual.merger.linear_fc2": (128, 256),
    "linear_proj.0": (128, 128),
    "linear_proj.2": (128, 128),
}
INTERN_S1_PRO = VLLM_2026["InternS1ProForConditionalGeneration"]
INDEXED = dict(
    indexer_n_heads=4,
    indexer_kv_heads=1,
    indexer_head_dim=128,
    indexer_budget=2048,
    indexer_compress_ratio=4,
)
IQUEST_NORMS = {"self_attn.q": 32, "self_attn.k": 32, "attn_out": 128, "ffn_out": 128}
GROUP = dict(n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=1)

LAYERS_ALONE: dict[str, Family] = {
    "Qwen4ExpForConditionalGeneration": Family(
        SHARED
        | LINEAR_ATTENTION
        | INDEXED
        | dict(layer_types=["linear_attention", "indexed_attention"], hc_count=2, hc_lowrank=32),
        untried=("sglang",),
        like="Qwen4ExpForConditionalGeneration",
        inside=TEXT,
        around=PATCHES,
    ),
    "LongcatFlashForCausalLM": replace(
        FAMILIES_2026["LongcatFlashForCausalLM"],
        # SGLang computes zero experts in blocks of 256, and without a factor.
        config=FAMILIES_2026["LongcatFlashForCausalLM"].config
        | dict(hidden_size=256, routed_scaling_factor=1.0),
        vllm=None,
        sglang=TRITON,
        like="LongcatFlashForCausalLM",
        replaced=FAMILIES_2026["LongcatFlashForCausalLM"].replaced
        | dict(rope_parameters=None, rope_theta=10000.0, rope_scaling=YARN),
    ),
    "Glm5NextForConditionalGeneration": replace(
        VLLM_2026["Glm5NextForConditionalGeneration"],
        like="Glm5NextForConditionalGeneration",
        untried=("sglang",),
        replaced=VLLM_2026["Glm5NextForConditionalGeneration"].replaced
        | dict(index_kpool_compress=True, first_k_dense_replace=1, moe_layer_freq=1),
    ),
    "InternS1ProForConditionalGeneration": replace(
        INTERN_S1_PRO,
        # It reads this angle from elsewhere, and falls back to a fixed one.
        config=INTERN_S1_PRO.config
        | dict(rope_parameters=INTERN_S1_PRO.config["rope_parameters"] | dict(rope_theta=1e6)),
        vllm=None,
        sglang={},
        like="InternS1ProForConditionalGeneration",
        parted="experts",
    ),
    "InternS2MobiusForConditionalGeneration": replace(
        VLLM_2026["InternS2MobiusForConditionalGeneration"],
        vllm=None,
        like="InternS2MobiusForConditionalGeneration",
        replaced=dict(model_type="interns2_mobius_text"),
        around=PATCHES
        | dict(vision_config=PATCHES["vision_config"] | dict(deepstack_visual_indexes=[])),
    ),
    "KimiK3LinearForCausalLM": replace(
        VLLM_2026["KimiK3ForConditionalGeneration"],
        like="KimiK3ForConditionalGeneration",
        renamed={"block_sparse_moe.": "mlp."},
        wrapped={},
    ),
    "BailingMoeV2_5ForCausalLM": LING_2_5,
    "BailingMoeV3ForCausalLM": replace(
        LING_2_5,
        replaced=LING_2_5.replaced
        | dict(short_conv_kernel_size=4, linear_attn_config=None, no_kda_lora=False),
    ),
    "GigaChat35ForCausalLM": Family(
        MLA | GROUPS | dict(topk_method="noaux_tc", scoring_func="sigmoid"),
        untried=("sglang",),
        like="DeepseekV3ForCausalLM",
        replaced=dict(
            model_type="gigachat3_5",
            layer_types=["full_attention"] * 2,
            rope_theta=10000.0,
            rope_scaling=YARN,
            moe_layer_freq=1,
        ),
        dropped=NO_ATTENTION,
    ),
    "K2HorizonForCausalLM": Family(
        GROUP | dict(routed_scaling_factor=2.5),
        untried=("sglang",),
        like="Glm4MoeForCausalLM",
        replaced=dict(
            model_type="k2_horizon",
            num_experts=EXPERTS,
            num_shared_experts=1,
            num_dense_layers=1,
            mlp_only_layers=[0],
            moe_gate_bias=True,
            router_score_func="sigmoid",
            router_scaling_factor=2.5,
            rope_theta=10000.0,
        ),
        renamed={"gate.e_score_correction_bias": "gate.bias"},
        dropped=NO_ATTENTION,
    ),
    "HunYuanDenseV1ForCausalLM": replace(
        FAMILIES_2026["HunYuanMoEV1ForCausalLM"], vllm=None, like="HunYuanMoEV1ForCausalLM"
    ),
    "IQuestQ1ForCausalLM": Family(
        {},
        untried=("sglang",),
        like="GraniteMoeForCausalLM",
        replaced=dict(
            model_type="iquest_q1",
            head_dim=32,
            dense_intermediate_size=32,
            num_experts=EXPERTS,
            use_hybrid_layers=False,
            mlp_only_layers=[],
            enable_sink_attention=False,
            rope_parameters=None,
        ),
        renamed={
            "block_sparse_moe.input_linear.weight": "mlp.experts.fc",
            "block_sparse_moe.output_linear.weight": "mlp.experts.proj",
            "block_sparse_moe.router.layer.": "mlp.router.",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "feed_forward_norm",
        },
        added={
            f"model.layers.{layer}.{name}_norm.weight": (size,)
            for layer in range(LAYERS)
            for name, size in IQUEST_NORMS.items()
            if layer == 0 or name != "ffn_out"
        },
    ),
    "MiniCPMV": MINICPM,
    "MiniCPMV4_6ForConditionalGeneration": MINICPM,
    "MiniCPMV4_7ForConditionalGeneration": replace(
        MINICPM,
        renamed={"model.": "llm.model.", "lm_head.": "llm.lm_head."},
        wrapped=MINICPM.wrapped | dict(model_type="minicpmv4_7"),
    ),
}
tower = {"model.visual.pos_embed.weight": (64, 64)} | {
    f"{'model.' * name.startswith('visual')}{name}.{part}": size[: None if part == "weight" else 1]
    for name, size in QWEN_TOWER.items()
    for part in ("weight", "bias")
}
LING_2 = ALIKE["BailingMoeV2ForCausalLM"]
# Ming.
for name in ("BailingMMNativeForConditionalGeneration", "BailingMM2NativeForConditionalGeneration"):
    LAYERS_ALONE[name] = replace(
        LING_2,
        vllm=None,
        like="Glm4MoeForCausalLM",
        renamed={"model.": "model.model.", "lm_head.": "model.lm_head."} | LING_2.renamed,
        wrapped=dict(
            model_type="bailingmm_moe_v2_lite",
            llm_config=None,
            vision_config=QWEN_VISION | dict(deepstack_visual_indexes=[]),
            mrope_section=[2, 3, 3],
        ),
        added={
            key.replace("linear_proj", "model.linear_proj"): size
            for key, size in tower.items()
            if "linear_proj.2" not in key
        },
    )
LAYERS_ALONE["XllmForCausalLM"] = LAYERS_ALONE["K2HorizonForCausalLM"]
LING_3 = LAYERS_ALONE["BailingMoeV3ForCausalLM"]
LAYERS_ALONE["BailingMoeV3VLForConditionalGeneration"] = replace(
    LING_3,
    # With no other attention than linear one, of which SGLang has that on the CPU.
    replaced=LING_3.replaced | dict(layer_group_size=[1, 1]),
    wrapped=dict(
        model_type="bailing_moe_v3_vl",
        text_config=None,
        vision_config=QWEN_VISION,
        mrope_section=[2, 3, 3],
    ),
    added=tower,
)
