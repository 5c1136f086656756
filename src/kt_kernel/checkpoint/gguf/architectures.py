"""The kinds of models with routed experts that GGUF files name (general.architecture).

A file's names and shapes say all that is needed to read it, so one of an unknown architecture is
read as well. The table gives the model type that Hugging Face has for one, and the architectures
whose experts are no SwiGLU: their weights would be read right and used wrong.
"""

from __future__ import annotations

#: Architecture to model_type of config.json.
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
