"""Tiny models with the configurations and experts of published ones, and their server commands.

The files have the experts alone, of random numbers: enough for all that happens before an engine
starts. The flags are those that publishers and the engines' own recipes give in 2026 for the models
in the comments, with parallel sizes of 1. Where the CPU needs another flag, it is at the end.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import expert_weights  # noqa: F401 - finds the makers of weights
import test_gptq
import torch
from gpt_oss_model import make_gpt_oss
from kimi_model import make_kimi
from quantised_files import Tensors
from safetensors.torch import save_file
from test_mxfp4 import matrix as mxfp4_matrix
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

EXPERTS, HIDDEN, INTERMEDIATE = 8, 256, 64
MARKS = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
)
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
W123 = ("w1", "w3", "w2")


class Published(NamedTuple):
    """classes: of its config.json. flags: of the commands of each engine. write: makes the model in
    a new folder."""

    classes: tuple[str, ...]
    write: Callable[[Path], Any]
    flags: dict[str, list[list[str]]]


def _write(
    path: Path,
    config: dict[str, Any],
    layers: range,
    where: str,
    names: tuple[str, str, str],
    make: Callable[[int, int], Tensors],
) -> None:
    """where: the experts' module in layer {layer}. names: of gate, up and down."""
    torch.manual_seed(0)
    tensors: Tensors = {}
    for layer in layers:
        for expert in range(EXPERTS):
            for name in names:
                size = (HIDDEN, INTERMEDIATE) if name == names[2] else (INTERMEDIATE, HIDDEN)
                start = f"{where.format(layer=layer)}.{expert}.{name}."
                tensors |= {start + part: tensor for part, tensor in make(*size).items()}
    path.mkdir()
    _write_tokenizer(path)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))


def _write_tokenizer(path: Path) -> None:
    """With the words at which the parsers of reasoning and tool calls look."""
    words = ("<unk>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<｜DSML｜", *MARKS)
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), unk_token="<unk>", additional_special_tokens=[*words[1:]]
    ).save_pretrained(path)


def _config(model_type: str, classes: tuple[str, ...], **settings: Any) -> dict[str, Any]:
    made = AutoConfig.for_model(model_type, **settings).to_dict()
    return made | {"architectures": [*classes], "torch_dtype": "bfloat16"}


_SIZES = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "n_routed_experts": EXPERTS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
}
_WORDS = {"vocab_size": 256, "max_position_embeddings": 262144, "num_attention_heads": 4}


def _kimi(path: Path, classes: tuple[str, ...]) -> None:
    make_kimi(path)
    _write_tokenizer(path)


def _gpt_oss(path: Path, classes: tuple[str, ...]) -> None:
    make_gpt_oss(path)
    _write_tokenizer(path)


def _deepseek_v4(path: Path, classes: tuple[str, ...]) -> None:
    """Experts in MXFP4, all else in FP8."""
    quantised = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    sizes = {name: size for name, size in _SIZES.items() if name != "intermediate_size"}
    config = _config("deepseek_v4", classes, **sizes, expert_dtype="fp4", n_shared_experts=1)
    for name in ("mlp_layer_types", "layer_types", "compress_rates", "rope_parameters"):
        del config[name]  # transformers' own

    def make(rows: int, columns: int) -> Tensors:
        codes, scales = mxfp4_matrix(rows, columns)
        return {"weight": codes.view(torch.int8), "scale": scales.view(torch.float8_e8m0fnu)}

    config |= {"quantization_config": quantised, "compress_ratios": [128, 128, 4, 128, 0]}
    config |= {"num_hash_layers": 1, "rope_theta": 10000}
    _write(path, config, range(4), "layers.{layer}.ffn.experts", W123, make)


def _qwen(path: Path, classes: tuple[str, ...]) -> None:
    """Experts in GPTQ, all else in 16 bits; with a vision model."""
    text = (
        _SIZES
        | _WORDS
        | {
            "num_key_value_heads": 2,
            "head_dim": 64,
            "shared_expert_intermediate_size": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": [
                "linear_attention",
                "linear_attention",
                "linear_attention",
                "full_attention",
            ],
            "mtp_num_hidden_layers": 1,
        }
    )
    vision = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
    vision["out_hidden_size"] = HIDDEN
    config = _config("qwen3_5_moe", classes, text_config=text, vision_config=vision)
    dense = (".*attn.*", ".*shared_expert.*", ".*mtp.*", ".*visual.*", r".*mlp\.gate$")
    config["quantization_config"] = test_gptq.config() | {
        "dynamic": {f"-:{name}": {} for name in dense}
    }
    _write(
        path,
        config,
        range(4),
        "model.language_model.layers.{layer}.mlp.experts",
        PROJECTIONS,
        test_gptq.make_with(zero=7),
    )


def _published(
    write: Callable[[Path, tuple[str, ...]], Any], *classes: str, **flags: list[str]
) -> Published:
    by_engine = {engine: [line.split() for line in lines] for engine, lines in flags.items()}
    return Published(classes, partial(write, classes=classes), by_engine)


MODELS = {
    "Kimi-K2": _published(  # moonshotai/Kimi-K2-Thinking
        _kimi,
        "DeepseekV3ForCausalLM",
        vllm=[
            "--served-model-name kimi-k2-thinking --trust-remote-code --tensor-parallel-size 1 "
            "--enable-auto-tool-choice --max-num-batched-tokens 32768 --tool-call-parser kimi_k2 "
            "--reasoning-parser kimi_k2 --gpu-memory-utilization 0.8 --max-num-seqs 256",
            "--trust-remote-code --data-parallel-size 1 --enable-expert-parallel "
            "--tool-call-parser kimi_k2 --enable-auto-tool-choice --async-scheduling "
            "--decode-context-parallel-size 1",
        ],
        sglang=[
            "--tp 1 --trust-remote-code --tool-call-parser kimi_k2 --reasoning-parser kimi_k2",
            "--tp-size 1 --dp-size 1 --ep-size 1 --trust-remote-code --mem-fraction-static 0.8 "
            "--context-length 512 --host 0.0.0.0",
        ],
    ),
    "gpt-oss": _published(  # openai/gpt-oss-120b
        _gpt_oss,
        "GptOssForCausalLM",
        vllm=[
            "--async-scheduling --no-enable-prefix-caching --max-cudagraph-capture-size 2048 "
            "--max-num-batched-tokens 8192 --stream-interval 20",
            "--tensor-parallel-size 1 --tool-call-parser openai --enable-auto-tool-choice "
            "--reasoning-parser openai_gptoss",
        ],
        sglang=[
            "--tp 1 --reasoning-parser gpt-oss --tool-call-parser gpt-oss",
            "--tp 1 --host 0.0.0.0 --reasoning-parser gpt-oss --mem-fraction-static 0.8",
        ],
    ),
    "DeepSeek-V4": _published(  # deepseek-ai/DeepSeek-V4-Flash
        _deepseek_v4,
        "DeepseekV4ForCausalLM",
        vllm=[
            "--trust-remote-code --kv-cache-dtype fp8 --block-size 256 --enable-expert-parallel "
            "--tensor-parallel-size 1 --data-parallel-size 1 --tokenizer-mode deepseek_v4 "
            "--tool-call-parser deepseek_v4 --enable-auto-tool-choice "
            "--reasoning-parser deepseek_v4",
            "--trust-remote-code --kv-cache-dtype fp8 --enable-expert-parallel "
            '--speculative-config {"method":"mtp","num_speculative_tokens":1} '
            '--compilation-config {"cudagraph_mode":"FULL_AND_PIECEWISE","custom_ops":["all"]}',
        ],
        sglang=[
            "--trust-remote-code --tp 1 --mem-fraction-static 0.82 --tool-call-parser deepseekv4 "
            "--reasoning-parser deepseek-v4",
            "--trust-remote-code --tp 1 --speculative-algo EAGLE --speculative-num-steps 3 "
            "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4 "
            "--chunked-prefill-size 4096 --disable-flashinfer-autotune",
        ],
    ),
    "Qwen3.5": _published(  # Qwen/Qwen3.5-397B-A17B-GPTQ-Int4
        _qwen,
        "Qwen3_5MoeForConditionalGeneration",
        vllm=[
            "--tensor-parallel-size 1 --max-model-len 262144 --reasoning-parser qwen3",
            "--tensor-parallel-size 1 --reasoning-parser qwen3 --enable-auto-tool-choice "
            "--tool-call-parser qwen3_coder --language-model-only --enable-prefix-caching",
        ],
        sglang=[
            "--tp-size 1 --mem-fraction-static 0.8 --context-length 262144 "
            "--reasoning-parser qwen3 --tool-call-parser qwen3_coder "
            "--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule",
            "--tp-size 1 --mem-fraction-static 0.8 --reasoning-parser qwen3 "
            "--speculative-algo NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
            "--speculative-num-draft-tokens 4 "
            "--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule",
        ],
    ),
}
