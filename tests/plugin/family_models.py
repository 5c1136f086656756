"""Tiny random models of the classes that the engines serve, in addition to tiny_model's Qwen3-MoE.

Weights are BF16 values, as in tiny_model. The reference is transformers in float32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_model import Reference, spread_prompts

LAYERS = 2
EXPERTS = 8
TOP_K = 2
VOCABULARY = 128
STEPS = 8
PROMPTS = spread_prompts(3, VOCABULARY, growth=3)

COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=32,
    moe_intermediate_size=32,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    num_experts=EXPERTS,
    num_local_experts=EXPERTS,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=TOP_K,
    decoder_sparse_step=1,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    initializer_range=0.15,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GROUPS = dict(
    n_group=2,
    topk_group=1,
    n_shared_experts=1,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    routed_scaling_factor=2.5,
)
# The ranks are those that the engines' attention supports. Published models have YaRN, too.
MLA = dict(
    q_lora_rank=32,
    kv_lora_rank=512,
    qk_nope_head_dim=32,
    qk_rope_head_dim=64,
    v_head_dim=32,
    num_key_value_heads=4,
    head_dim=64,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=10000.0,
        factor=4.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=128,
        beta_fast=32,
        beta_slow=1,
    ),
)
SHARED = dict(shared_expert_intermediate_size=64)
MAMBA = dict(
    mamba_num_heads=8,
    mamba_head_dim=64,
    n_groups=1,
    ssm_state_size=64,
    expand=1,
    use_mamba_kernels=False,
    time_step_limit=[0.0, 1e6],
)
LINEAR_ATTENTION = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    layer_types=["linear_attention", "full_attention"],
    full_attention_interval=2,
)


@dataclass(frozen=True)
class Family:
    """A model class.

    config: in addition to COMMON. vllm, sglang: arguments of the engine on the CPU; None if it does
    not serve the class. gpu: engines that serve it only with a GPU. untried: the same, but not run
    yet, so the class is not on the engine's tested list. published: the class's name in published
    checkpoints, if not transformers'. settings: the name of its configuration's class, if it does
    not follow from its own. top_k: experts per token. unset: biases that an engine ignores on the
    CPU; they are left at zero. replaced: settings in the written config.json, None for those that
    published ones lack. median, mean: how far log-probabilities may be from the reference's.
    """

    config: dict[str, Any]
    vllm: dict[str, Any] | None = None
    sglang: dict[str, Any] | None = None
    gpu: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    published: str | None = None
    settings: str | None = None
    top_k: int = TOP_K
    unset: str = "-"
    replaced: dict[str, Any] = field(default_factory=dict)
    median: float = 0.005
    mean: float = 0.01


# On CPUs with AMX, vLLM would select an attention backend without float32.
CPU_MLA = {"attention_backend": "CPU_MLA"}

FAMILIES = {
    "DeepseekV2ForCausalLM": Family(
        MLA
        | GROUPS
        | dict(topk_method="group_limited_greedy", norm_topk_prob=False, scoring_func="softmax"),
        CPU_MLA,
        gpu=("sglang",),
    ),
    "DeepseekV3ForCausalLM": Family(  # Kimi-K2's class, too
        MLA | GROUPS | dict(topk_method="noaux_tc", scoring_func="sigmoid"),
        CPU_MLA,
        gpu=("sglang",),
    ),
    "Cohere2MoeForCausalLM": Family(
        dict(layer_types=["sliding_attention", "full_attention"], tie_word_embeddings=True), {}
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        dict(
            moe_num_experts=EXPERTS, moe_k=TOP_K, moe_layer_start_index=1, moe_num_shared_experts=1
        ),
        {},
        {},
        unset="moe_statics",
    ),
    "ExaoneMoeForCausalLM": Family(
        GROUPS | dict(layer_types=["sliding_attention", "full_attention"], num_shared_experts=1),
        {},
    ),
    "Glm4MoeForCausalLM": Family(GROUPS, {}, {}),
    "GptOssForCausalLM": Family(dict(layer_types=["sliding_attention", "full_attention"])),
    "GraniteMoeForCausalLM": Family({}, {}, {}),
    "GraniteMoeSharedForCausalLM": Family(dict(shared_intermediate_size=64), {}),
    "Llama4ForCausalLM": Family(
        dict(
            intermediate_size_mlp=64,
            attention_chunk_size=128,
            layer_types=["chunked_attention", "full_attention"],
        ),
        {},
        settings="Llama4TextConfig",
        top_k=1,
    ),
    "MixtralForCausalLM": Family({}, {}, {}),
    "NemotronHForCausalLM": Family(
        MAMBA
        | dict(
            layers_block_type=["mamba", "attention", "moe"],
            num_hidden_layers=3,
            mlp_hidden_act="relu2",
            n_group=1,
            topk_group=1,
            n_shared_experts=1,
            moe_shared_expert_intermediate_size=64,
            routed_scaling_factor=2.5,
        ),
        untried=("vllm", "sglang"),
        replaced=dict(
            hybrid_override_pattern="M*E",
            num_hidden_layers=3,
            layers_block_type=None,
            mtp_layers_block_type=None,
        ),
    ),
    "OlmoeForCausalLM": Family(dict(num_key_value_heads=4, norm_topk_prob=False), {}, {}),
    "PhimoeForCausalLM": Family(
        dict(lm_head_bias=True, attention_bias=True),
        {},
        {},
        published="PhiMoEForCausalLM",
        unset="lm_head.bias",
    ),
    "Qwen2MoeForCausalLM": Family(SHARED, {}, {}),
    # vLLM's linear attention on the CPU supports only BF16.
    "Qwen3NextForCausalLM": Family(
        SHARED | LINEAR_ATTENTION, {"dtype": "bfloat16"}, gpu=("sglang",), median=0.03, mean=0.06
    ),
}


def make(name: str, path: Path, seed: int = 0, **changed: Any) -> Path:
    """Writes the checkpoint of a class (transformers' name) to folder ``path``. changed: settings
    of its configuration."""
    torch.manual_seed(seed)
    family = FAMILIES[name]
    settings = family.settings or name.removesuffix("ForCausalLM") + "Config"
    given = COMMON | {"num_experts_per_tok": family.top_k} | family.config | changed
    model = getattr(transformers, name)(getattr(transformers, settings)(**given))
    for key, tensor in model.state_dict().items():
        gate = key.endswith(".gate.weight") and not tensor.any()  # zeros would tie all experts
        if gate or ("bias" in key and family.unset not in key):
            tensor.normal_(std=0.15)
    model.to(torch.bfloat16).save_pretrained(path)
    file = path / "config.json"
    if family.published:
        file.write_text(file.read_text().replace(name, family.published))
    if family.replaced:
        written = json.loads(file.read_text()) | family.replaced
        file.write_text(json.dumps({k: v for k, v in written.items() if v is not None}))
    return path


class FamilyReference(Reference):
    """transformers in float32, for any class."""

    def __init__(self, name: str, path: Path) -> None:
        self.model = getattr(transformers, name).from_pretrained(
            path, dtype=torch.float32, experts_implementation="eager", attn_implementation="eager"
        )
        self.model.eval()
        pairs = [
            [getattr(module, name, None) for name in names]
            for module in self.model.modules()
            for names in (
                ("gate_up_proj", "down_proj"),
                ("input_linear", "output_linear"),
                ("up_proj", "down_proj"),
            )
        ]
        weights = [[getattr(one, "weight", one) for one in both] for both in pairs]
        self._experts = [both for both in weights if _stacked(both[0]) and _stacked(both[1])]
        self.moe_layers = len(self._experts)

    def stacks(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(gate_up.data, down.data) for gate_up, down in self._experts]


def _stacked(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) and weight.dim() == 3
