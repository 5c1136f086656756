"""A tiny Kimi-K3, of which only the MoE layers have weights, and what these compute.

transformers does not know the class. Experts work on a projection of the hidden states, between
`routed_expert_down_proj` and `routed_expert_up_proj`, and their activation is SiTU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from families_multimodal import KIMI_VISION
from family_models import FamilyReference
from family_settings import COMMON, EXPERTS, TOP_K
from safetensors.torch import load_file, save_file

NAME = "KimiK3ForConditionalGeneration"
HIDDEN, LATENT, INTER = 128, 64, 32
BETA, LINEAR_BETA = 4.0, 25.0
TEXT: dict[str, Any] = COMMON | dict(
    model_type="kimi_linear",
    hidden_act="situ",
    activation_situ_beta=BETA,
    activation_situ_linear_beta=LINEAR_BETA,
    first_k_dense_replace=1,
    num_experts_per_token=TOP_K,
    num_shared_experts=1,
    moe_intermediate_size=INTER,
    routed_expert_hidden_size=LATENT,
    latent_moe_use_norm=True,
    attn_res_block_size=2,
    q_lora_rank=32,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
    num_key_value_heads=4,
    head_dim=32,
    linear_attn_config=dict(
        kda_layers=[1], full_attn_layers=[2], num_heads=4, head_dim=32, short_conv_kernel_size=4
    ),
)
del TEXT["decoder_sparse_step"]
LAYER = "layers.1.block_sparse_moe"


def make(path: Path) -> Path:
    """Writes the checkpoint to folder ``path``."""
    torch.manual_seed(0)
    path.mkdir()
    config = dict(
        model_type="kimi_k3", architectures=[NAME], text_config=TEXT, vision_config=KIMI_VISION
    )
    (path / "config.json").write_text(json.dumps(config))
    sizes = {
        "gate.weight": (EXPERTS, HIDDEN),
        "gate.e_score_correction_bias": (EXPERTS,),
        "routed_expert_down_proj.weight": (LATENT, HIDDEN),
        "routed_expert_norm.weight": (LATENT,),
        "routed_expert_up_proj.weight": (HIDDEN, LATENT),
        "shared_experts.gate_proj.weight": (INTER, HIDDEN),
        "shared_experts.up_proj.weight": (INTER, HIDDEN),
        "shared_experts.down_proj.weight": (HIDDEN, INTER),
    }
    for expert in range(EXPERTS):
        sizes |= {
            f"experts.{expert}.w1.weight": (INTER, LATENT),
            f"experts.{expert}.w3.weight": (INTER, LATENT),
            f"experts.{expert}.w2.weight": (LATENT, INTER),
        }
    tensors = {
        f"language_model.{LAYER}.{part}": torch.randn(size).mul(0.15).bfloat16()
        for part, size in sizes.items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def situ(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate)
    return gate * LINEAR_BETA * torch.tanh(up / LINEAR_BETA)


class Experts(torch.nn.Module):
    """All experts on x [T, L], with each token's experts and weights [T, k]."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("tl,ekl->tek", x, self.gate_up_proj).chunk(2, -1)
        every = torch.einsum("tei,eli->tel", situ(gate, up), self.down_proj)
        chosen = every.gather(1, ids[..., None].expand(-1, -1, x.shape[1]))
        return (chosen * weights[..., None]).sum(1)


class Block(torch.nn.Module):
    """One MoE layer."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.own = tensors
        stacks = [
            torch.stack([tensors[f"experts.{e}.{name}.weight"] for e in range(EXPERTS)])
            for name in ("w1", "w3", "w2")
        ]
        self.experts = Experts(torch.cat(stacks[:2], 1), stacks[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, own = x.reshape(-1, HIDDEN), self.own

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            return x @ own[f"{name}.weight"].T

        scores = torch.sigmoid(linear(x, "gate"))
        ids = (scores + own["gate.e_score_correction_bias"]).topk(TOP_K).indices
        weights = scores.gather(1, ids)
        weights = weights / weights.sum(1, keepdim=True)
        latent = self.experts(linear(x, "routed_expert_down_proj"), ids, weights)
        normed = torch.nn.functional.rms_norm(
            latent, (LATENT,), own["routed_expert_norm.weight"], eps=1e-6
        )
        shared = situ(linear(x, "shared_experts.gate_proj"), linear(x, "shared_experts.up_proj"))
        out = linear(normed, "routed_expert_up_proj")
        return out + linear(shared, "shared_experts.down_proj")


class K3Reference(FamilyReference):
    """The MoE layer in float32."""

    def __init__(self, name: str, path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        own = {key.partition(f"{LAYER}.")[2]: t.float() for key, t in tensors.items()}
        self.model = torch.nn.ModuleList([Block(own)])
        experts = self.model[0].experts
        self._experts = [[experts.gate_up_proj, experts.down_proj]]
        self.moe_layers = 1
