"""Tiny models of SGLang's classes that compute what no class of transformers does. The engine sets
random weights, as for ``kt model check``."""

from __future__ import annotations

from typing import Any

from families_multimodal import TOWER
from family_settings import COMMON, EXPERTS, TOP_K

# config.json without its architectures, and the engine's arguments.
OWN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BeamForCausalLM": (
        COMMON
        | dict(
            model_type="beam",
            n_group=2,
            topk_group=1,
            routed_scaling_factor=1.0,  # which SGLang leaves to its kernels for GPUs
            layer_types=["sliding_attention", "full_attention"],
            mlp_layer_types=["dense", "sparse"],
            sliding_window=64,
        ),
        {},
    ),
    "Step3VLForConditionalGeneration": (
        dict(
            model_type="step3_vl",
            text_config=COMMON
            | dict(
                model_type="step3_text",
                num_attention_groups=1,
                max_seq_len=512,
                moe_num_experts=EXPERTS,
                moe_top_k=TOP_K,
                share_expert_dim=32,
                share_q_dim=64,
                norm_expert_weight=True,
                moe_layers_enum="1",
            ),
            vision_config=TOWER | dict(output_hidden_size=128, image_size=56, patch_size=14),
        ),
        {"enable_multimodal": False},
    ),
}
