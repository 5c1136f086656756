"""The MoE architectures that GGUF files name (general.architecture).

Names and shapes are enough to read a file, so unknown architectures are read as well. This module
maps architectures to Hugging Face's model types, and lists those whose experts are not SwiGLU:
their weights could be read, but the results would be wrong.
"""

from __future__ import annotations

#: Architecture to model_type in config.json.
ARCHITECTURES: dict[str, str] = {
    "afmoe": "afmoe",
    "bailingmoe": "bailing_moe",
    "bailingmoe2": "bailing_moe_v2",
    "dbrx": "dbrx",
    "deepseek": "deepseek",
    "deepseek2": "deepseek_v3",
    "dots1": "dots1",
    "ernie4_5-moe": "ernie4_5_moe",
    "exaone-moe": "exaone_moe",
    "glm4moe": "glm4_moe",
    "glm-dsa": "glm_moe_dsa",
    "gpt-oss": "gpt_oss",
    "granitehybrid": "granitemoehybrid",
    "granitemoe": "granitemoe",
    "grovemoe": "grove_moe",
    "hunyuan-moe": "hunyuan_v1_moe",
    "jamba": "jamba",
    "kimi-linear": "kimi_linear",
    "lfm2moe": "lfm2_moe",
    "llada-moe": "llada_moe",
    "llama": "mixtral",
    "llama4": "llama4_text",
    "mimo2": "mimo_v2_flash",
    "minicpm": "minicpm",
    "minimax-m2": "minimax_m2",
    "mistral4": "mistral4",
    "olmoe": "olmoe",
    "phimoe": "phimoe",
    "qwen2moe": "qwen2_moe",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3moe": "qwen3_moe",
    "qwen3next": "qwen3_next",
    "qwen3vlmoe": "qwen3_vl_moe",
}

#: Architectures that are refused, with the reason.
REFUSED: dict[str, str] = {
    "gemma4": "its experts use GELU",
    "grok": "its experts use GELU",
    "nemotron_h_moe": "its experts have no gate and use squared ReLU",
    "nomic-bert-moe": "its experts have no gate and use GELU",
    "smallthinker": "its experts use ReLU",
}
