"""Tiny models of multimodal classes that transformers does not know, around text models that it
knows, or that ``families_alike`` describes. Their prompts are text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from families_2026 import FAMILIES_2026, TRITON
from families_alike import ALIKE
from families_multimodal import IN_LANGUAGE_MODEL, KIMI_VISION, TOWER
from family_settings import GROUPS, MLA, Family

# As published; the engine's own configuration does not read transformers' names.
DEEPSEEK: dict[str, Any] = dict(
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    rope_theta=10000.0,
    rope_scaling=MLA["rope_parameters"] | dict(type="yarn"),
    rope_parameters=None,
    moe_layer_freq=1,
)
IMAGES = dict(image_size=56, patch_size=14)
RADIO = dict(
    llm_config=None,
    vision_config=dict(
        args=dict(model="vit_small_patch16_224"),
        preferred_resolution=[64],
        video_temporal_patch_size=2,
    ),
    video_temporal_patch_size=2,
    vit_hidden_size=384,
    projector_hidden_size=64,
)

# The loader of the first one knows queries of full rank only.
KIMI_VL = Family(
    MLA | GROUPS | dict(q_lora_rank=None),
    sglang=TRITON,
    like="DeepseekV3ForCausalLM",
    replaced=DEEPSEEK,
    renamed=IN_LANGUAGE_MODEL,
    wrapped=dict(model_type="kimi_vl", text_config=None, vision_config=KIMI_VISION),
)
DEEPSEEK_VL2 = replace(
    KIMI_VL,
    renamed={"model.": "language.model.", "lm_head.": "language.lm_head."},
    wrapped=dict(
        model_type="deepseek_vl_v2",
        tile_tag="2D",
        language_config=None,
        projector_config=dict(projector_type="linear", input_dim=64, n_embed=128),
    ),
)
MISTRAL_LARGE_3 = ALIKE["MistralLarge3ForCausalLM"]
NEMOTRON_H = replace(
    FAMILIES_2026["NemotronHForCausalLM"],
    vllm=None,
    like="NemotronHForCausalLM",
    renamed={"backbone.": "language_model.backbone.", "lm_head.": "language_model.lm_head."},
)

WRAPPED: dict[str, Family] = {
    "KimiVLForConditionalGeneration": KIMI_VL,
    "DeepseekVL2ForCausalLM": DEEPSEEK_VL2,
    "DotsVLMForCausalLM": Family(
        MLA | GROUPS,
        sglang=TRITON | {"enable_multimodal": False},
        like="DeepseekV3ForCausalLM",
        replaced=DEEPSEEK
        | dict(
            model_type="dots_vlm", vision_config=TOWER | dict(embed_dim=64, spatial_merge_size=2)
        ),
    ),
    "PixtralForConditionalGeneration": replace(
        MISTRAL_LARGE_3,
        vllm=None,
        replaced=MISTRAL_LARGE_3.replaced | dict(model_type="deepseek_v3"),
        wrapped=dict(
            model_type="mistral3",
            text_config=None,
            vision_config=TOWER
            | IMAGES
            | dict(rope_theta=10000.0, adapter_bias=False, image_token_id=130),
        ),
    ),
    "InternS1ForConditionalGeneration": Family(
        {},
        sglang={},
        like="Qwen3MoeForCausalLM",
        renamed={"model.": "model.language_model."},
        wrapped=dict(
            model_type="internvl",
            text_config=None,
            vision_config=TOWER
            | dict(
                image_size=[56, 56],
                patch_size=[14, 14],
                drop_path_rate=0.0,
                dropout=0.0,
                initializer_factor=0.1,
                norm_type="layer_norm",
                qkv_bias=True,
                qk_normalization=False,
            ),
            downsample_ratio=0.5,
            vision_feature_layer=-1,
        ),
    ),
    "Cohere2VisionForConditionalGeneration": Family(
        dict(layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=True),
        sglang={},
        like="Cohere2MoeForCausalLM",
        renamed={"model.": "model.language_model."},
        wrapped=dict(
            model_type="cohere2_vision",
            text_config=None,
            vision_config=TOWER | IMAGES,
            alignment_intermediate_size=64,
            image_token_id=130,
        ),
    ),
}
for name, kind in (
    ("NemotronH_Nano_VL_V2", "NemotronH_Nano_VL_V2"),
    ("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Nano_Omni_Reasoning_V3"),
    ("NemotronH_Omni_Reasoning_V3", "nemotron_h_omni"),
):
    WRAPPED[name] = replace(NEMOTRON_H, wrapped=RADIO | dict(model_type=kind))
