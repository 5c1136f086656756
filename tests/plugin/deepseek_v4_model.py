"""A tiny DeepSeek-V4: as published, with its experts in MXFP4 and most dense matrices in FP8; the
same with these matrices in 16 bits, because vLLM's kernels for FP8 in blocks need a CPU with AMX;
and the same values in 16 bits, alone and as the text model of the class with images.

The layers have the three kinds of attention, and the first one routes by the numbers of the tokens.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import expert_weights  # noqa: F401 - finds test_mxfp4
import torch
from family_models import FAMILIES, FamilyReference, make, whole_of
from safetensors.torch import load_file, save_file
from test_mxfp4 import dequantise

NAME = "DeepseekV4ForCausalLM"
WITH_IMAGES = "DeepseekV4ForConditionalGeneration"
# Numbers of experts and of experts per token for which vLLM's CPU has routing kernels, as has the
# published model.
EXPERTS, TOP_K = 64, 6
RATIOS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}
LAYERS = len(RATIOS)
HASHED = 1  # layers that route by the numbers of tokens
SIZES: dict[str, Any] = dict(
    num_experts=EXPERTS,
    num_local_experts=EXPERTS,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=TOP_K,
    num_hidden_layers=LAYERS,
    hidden_size=256,
    moe_intermediate_size=128,
    intermediate_size=128,
    q_lora_rank=128,
    o_lora_rank=128,
    initializer_range=0.1,
    layer_types=[*RATIOS],
    mlp_layer_types=["hash_moe"] * HASHED + ["moe"] * (LAYERS - HASHED),
)
# Of the encoder of images. A published config.json has them beside the text model's settings, and
# its architectures name the class without images.
VISION = dict(
    vision_n_layers=1,
    vision_dim=64,
    vision_n_heads=2,
    vision_inter_dim=64,
    vision_patch_size=14,
    vision_downsample_ratio=2,
    vision_rope_theta=10000.0,
    vision_max_n_token=256,
    vision_min_pixels=784,
    vision_max_wh_ratio=8,
)
BLOCK = 128
QUANTISATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
_EXPERT = re.compile(r"\.ffn\.experts\.\d+\.w[123]\.weight$")
_DENSE = re.compile(r"\.(attn\.w\w+|attn\.indexer\.wq_b|shared_experts\.w[123])\.weight$")


def make_deepseek_v4(values: Path, experts_only: Path, published: Path) -> None:
    """Writes the model to three new folders: in 16 bits, with quantised experts, and with these
    and dense matrices in FP8."""
    make(NAME, values, **SIZES)
    whole = whole_of(values) / "model.safetensors"
    plain, quantised, fp8 = load_file(whole), {}, {}
    for name, tensor in plain.items():
        if not _EXPERT.search(name):
            if _DENSE.search(_published(name)):
                plain[name] = tensor = _in_fp8(_published(name), tensor, fp8)
            quantised[_published(name)] = tensor
            continue
        rows, columns = tensor.shape
        weight = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        scale = torch.randint(121, 124, (rows, columns // 32), dtype=torch.uint8)
        plain[name] = dequantise(weight, scale).bfloat16().contiguous()
        stem = _published(name).removesuffix("weight")
        quantised[f"{stem}weight"] = weight.view(torch.int8)
        quantised[f"{stem}scale"] = scale.view(torch.float8_e8m0fnu)
    save_file(plain, whole, {"format": "pt"})
    renamed = {_renamed(name): tensor for name, tensor in plain.items()}
    save_file(renamed, values / "model.safetensors", {"format": "pt"})
    config = json.loads((values / "config.json").read_text())
    config |= {"compress_ratios": [*RATIOS.values()], "num_hash_layers": HASHED}
    for folder in (values, whole_of(values)):
        (folder / "config.json").write_text(json.dumps(config))
    for folder, tensors in ((experts_only, quantised), (published, quantised | fp8)):
        ignored = [
            name.removesuffix(".weight")
            for name in tensors
            if ".experts." not in name and (folder == experts_only or name not in fp8)
        ]
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        config |= {"quantization_config": QUANTISATION | {"ignored_layers": ignored}}
        (folder / "config.json").write_text(json.dumps(config | {"expert_dtype": "fp4"}))


def make_with_images(values: Path, folder: Path) -> None:
    """Writes the model in `values` to a new folder, as a part of the one with images. Tensors of
    the encoder are missing, because prompts are text."""
    tensors = load_file(whole_of(values) / "model.safetensors")
    folder.mkdir()
    named = {_published(name).replace("lm_head.", "head."): one for name, one in tensors.items()}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((values / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | VISION))


def _in_fp8(name: str, weight: torch.Tensor, to: dict[str, torch.Tensor]) -> torch.Tensor:
    """Adds a matrix in E4M3 and its block scales, powers of two, to `to`. Returns its values."""
    blocks = weight.float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    exponent = (blocks.abs().amax((1, 3)) / 448).log2().ceil()
    scale = exponent.exp2()[:, None, :, None]
    codes = (blocks / scale).to(torch.float8_e4m3fn)
    to[name] = codes.flatten(2).flatten(0, 1)
    exponents = (exponent + 127).to(torch.uint8)
    to[f"{name.removesuffix('weight')}scale"] = exponents.view(torch.float8_e8m0fnu)
    return (codes.float() * scale).flatten(2).flatten(0, 1).to(weight.dtype)


def _renamed(name: str) -> str:
    for old, new in FAMILIES[NAME].renamed.items():
        name = name.replace(old, new)
    return name


def _published(name: str) -> str:
    return _renamed(name).removeprefix("model.").replace("embed_tokens.", "embed.")


class DeepseekV4Reference(FamilyReference):
    """transformers in float32; ``put(offset)`` gives each expert the weights of the expert so many
    places before it."""

    def __init__(self, values: Path) -> None:
        super().__init__(NAME, values)
        self._own = [[stack.clone() for stack in stacks] for stacks in self.stacks()]

    def put(self, offset: int = 0) -> None:
        for stacks, own in zip(self.stacks(), self._own, strict=True):
            for stack, values in zip(stacks, own, strict=True):
                stack.copy_(values.roll(offset, 0))
