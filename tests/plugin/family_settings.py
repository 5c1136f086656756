"""Settings that the tiny models of many classes share, and what the tests say of a class."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

LAYERS = 2
EXPERTS = 8
TOP_K = 2
VOCABULARY = 128
# Of images and the like in a request: so the engine needs no processor for them.
NO_MEDIA = {"image": 0, "video": 0, "audio": 0}

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
LLAMA4 = dict(
    intermediate_size_mlp=64,
    attention_chunk_size=128,
    layer_types=["chunked_attention", "full_attention"],
)
MAMBA = dict(
    mamba_num_heads=8,
    mamba_head_dim=64,
    n_groups=1,
    ssm_state_size=64,
    expand=1,
    use_mamba_kernels=False,
    time_step_limit=[0.0, 1e6],
)
NEMOTRON_H = MAMBA | dict(
    layers_block_type=["mamba", "attention", "moe"],
    num_hidden_layers=3,
    mlp_hidden_act="relu2",
    n_groups=8,  # SGLang's code for the CPU makes one for each head
    n_group=1,
    topk_group=1,
    n_shared_experts=1,
    moe_shared_expert_intermediate_size=64,
    routed_scaling_factor=1.0,  # which SGLang leaves to its kernels for GPUs
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
    not follow from its own. inside: for a multimodal class, the names of the nested configurations
    that lead to that of the text model. around: settings of the other parts. wide: further ones at
    the sizes that GPUs need. top_k: experts per token. unset: biases that an engine ignores on the
    CPU; they are left at zero. replaced: settings of the text model in the written config.json,
    None for those that published ones lack. repeated: further ones, and those whose values they
    have. dropped: a pattern of the tensors that published checkpoints lack. transposed: whether
    published stacks of experts are [E, H, 2 I] and [E, I, H]. renamed: parts of the tensors' names,
    and what published checkpoints have instead. joined: names of tensors, as renamed, and those
    whose rows they have. interleaved: ends of names, as joined, of stacks whose rows of gate and up
    alternate. parted: into what published checkpoints part stacks of experts, see
    `family_models._parted`. text_only: whether the text model of a multimodal class is published by
    itself. like: for a class that transformers does not know, one of transformers, or of
    reference_models, that computes the same. wrapped: for a wrapper that transformers does not
    know, its config.json around that of the text model, which is at the key with None. added: zero
    tensors of other parts that its loader needs, by name. median, mean: how far log-probabilities
    may be from the reference's. by_stock: engines that do not compute what transformers does, so
    they are compared with themselves. cold_only: engines whose kernels for the CPU cannot compute
    any of its experts, so none is hot. tokenizer: whether the engine's class reads one when it is
    built.
    """

    config: dict[str, Any]
    vllm: dict[str, Any] | None = None
    sglang: dict[str, Any] | None = None
    gpu: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    published: str | None = None
    settings: str | None = None
    inside: tuple[str, ...] = ()
    around: dict[str, Any] = field(default_factory=dict)
    wide: dict[str, Any] = field(default_factory=dict)
    top_k: int = TOP_K
    unset: str = "-"
    replaced: dict[str, Any] = field(default_factory=dict)
    repeated: dict[str, str] = field(default_factory=dict)
    dropped: str | None = None
    transposed: bool = False
    renamed: dict[str, str] = field(default_factory=dict)
    joined: dict[str, tuple[str, ...]] = field(default_factory=dict)
    interleaved: tuple[str, ...] = ()
    parted: Literal["experts", "linear", "numbers", "stacks"] | None = None
    text_only: bool = False
    tokenizer: bool = False
    like: str | None = None
    wrapped: dict[str, Any] = field(default_factory=dict)
    added: dict[str, tuple[int, ...]] = field(default_factory=dict)
    median: float = 0.005
    mean: float = 0.01
    by_stock: tuple[str, ...] = ()
    cold_only: tuple[str, ...] = ()

    def on_cpu(self, engine: str) -> dict[str, Any] | None:
        """The engine's arguments; None if it does not serve the class on the CPU."""
        given = {"vllm": self.vllm, "sglang": self.sglang}[engine]
        if given is None or self.text_only or not (self.inside or self.wrapped):
            return given
        if engine == "vllm":
            return {"limit_mm_per_prompt": NO_MEDIA} | given
        return {"enable_multimodal": False} | given
