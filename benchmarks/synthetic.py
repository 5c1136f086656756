"""Checkpoints of full width, reduced depth and random weights, for the engine benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from shapes import Shape

from kt_kernel.testing import int4_settings

SCALE = 0.02  # standard deviation of all weights except the norms
SEED = 0
SHARD_BYTES = 4 << 30  # approximate; writing a shard takes twice its size in memory


def config(shape: Shape, layers: int, vocabulary: int) -> dict[str, Any]:
    """A Qwen3-MoE model with the experts of ``shape``. Its attention has H / 64 heads of 128."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inter,
        "moe_intermediate_size": shape.inter,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": layers,
        "head_dim": 128,
        "num_attention_heads": max(shape.hidden // 64, 4),
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "bfloat16",
        "attention_bias": False,
        "router_aux_loss_coef": 0.0,
        "initializer_range": SCALE,
        "use_cache": True,
    }


def _int4_matrix(rows: int, columns: int, random: torch.Generator) -> dict[str, torch.Tensor]:
    """The tensors of a matrix with 4 bits, whose weights are evenly distributed."""
    words = torch.randint(-(1 << 31), 1 << 31, (rows, columns // 8), generator=random)
    evenly = ((16**2 - 1) / 12) ** 0.5  # standard deviation of the integers
    return {
        "weight_packed": words.to(torch.int32),
        "weight_scale": torch.full((rows, columns // 32), SCALE / evenly, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns]),
    }


def make(
    folder: Path, shape: Shape, layers: int, vocabulary: int = 32768, *, int4: bool = False
) -> Path:
    """Writes config.json and the shards of each layer. Does nothing if they exist.

    Every expert has the weights of the first one, rotated: random numbers for hundreds of gigabytes
    would take longer than the whole measurement. int4: the experts, and nothing else, have 4 bits
    with a scale per 32 columns, as compressed-tensors packs them.
    """
    done = folder / "config.json"
    about = config(shape, layers, vocabulary)
    if int4:
        about["quantization_config"] = int4_settings(
            ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
        )
    wanted = json.dumps(about, indent=1)
    if done.exists() and done.read_text() == wanted:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    random = torch.Generator().manual_seed(SEED)

    def weight(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=random) * SCALE).to(torch.bfloat16)

    names: dict[str, str] = {}

    def save(shard: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / shard, {"format": "pt"})
        names.update(dict.fromkeys(tensors, shard))

    h, c = shape.hidden, config(shape, layers, vocabulary)
    heads, pairs = c["num_attention_heads"] * 128, c["num_key_value_heads"] * 128
    ones = torch.ones(h, dtype=torch.bfloat16)
    save(
        "rest.safetensors",
        {
            "model.embed_tokens.weight": weight(vocabulary, h),
            "lm_head.weight": weight(vocabulary, h),
            "model.norm.weight": ones,
        },
    )
    for layer in range(layers):
        place = f"model.layers.{layer}"
        tensors = {
            f"{place}.input_layernorm.weight": ones.clone(),
            f"{place}.post_attention_layernorm.weight": ones.clone(),
            f"{place}.self_attn.q_norm.weight": torch.ones(128, dtype=torch.bfloat16),
            f"{place}.self_attn.k_norm.weight": torch.ones(128, dtype=torch.bfloat16),
            f"{place}.self_attn.q_proj.weight": weight(heads, h),
            f"{place}.self_attn.k_proj.weight": weight(pairs, h),
            f"{place}.self_attn.v_proj.weight": weight(pairs, h),
            f"{place}.self_attn.o_proj.weight": weight(h, heads),
            f"{place}.mlp.gate.weight": weight(shape.experts, h),
        }
        matrices = {
            "gate_proj": (shape.inter, h),
            "up_proj": (shape.inter, h),
            "down_proj": (h, shape.inter),
        }
        first = {
            f"{matrix}.{name}": tensor
            for matrix, size in matrices.items()
            for name, tensor in (
                _int4_matrix(*size, random) if int4 else {"weight": weight(*size)}
            ).items()
        }
        for expert in range(shape.experts):
            for name, tensor in first.items():
                turned = tensor.roll((expert, 7 * expert), (0, 1)) if tensor.ndim > 1 else tensor
                tensors[f"{place}.mlp.experts.{expert}.{name}"] = turned.clone()
            if expert + 1 == shape.experts or _bytes(tensors) > SHARD_BYTES:
                save(f"layer-{layer:03}-{expert:04}.safetensors", tensors)
                tensors = {}
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    done.write_text(wanted)
    return folder


def make_fp8(folder: Path, shape: Shape, layers: int) -> Path:
    """Writes the experts alone, in FP8 with blocks of 128 x 128, for --kt-weight-path."""
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(SEED)
    names: dict[str, str] = {}
    sizes = {
        "gate_proj": (shape.inter, shape.hidden),
        "up_proj": (shape.inter, shape.hidden),
        "down_proj": (shape.hidden, shape.inter),
    }
    for layer in range(layers):
        tensors: dict[str, torch.Tensor] = {}
        for name, (rows, columns) in sizes.items():
            codes = torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn)
            for expert in range(shape.experts):
                place = f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight"
                turned = codes.view(torch.uint8).roll((expert, 7 * expert), (0, 1))
                tensors[place] = turned.view(torch.float8_e4m3fn)
                tensors[f"{place}_scale_inv"] = torch.full(
                    (-(-rows // 128), -(-columns // 128)), SCALE
                )
        shard = f"layer-{layer:03}.safetensors"
        save_file(tensors, folder / shard, {"format": "pt"})
        names.update(dict.fromkeys(tensors, shard))
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    about = config(shape, layers, 256) | {"quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(about, indent=1))
    return folder


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
