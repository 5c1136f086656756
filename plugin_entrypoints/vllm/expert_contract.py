"""The part of vLLM's contract about its expert layers: what a model may request of its experts.

The router runs before them, in vLLM. See ``contract.py``, which includes this part.
"""

from ..contract import Arguments, Refusal

LAYERS = "vllm.model_executor.layers.fused_moe"
EXPERTS = f"{LAYERS}.routed_experts:RoutedExperts"
MOE_CONFIG = f"{LAYERS}.config:FusedMoEConfig"

# Honoured by the CPU layer, see kt_kernel.serving.activations.
_SWIGLU = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")

EXPERT_ARGUMENTS = Arguments(
    EXPERTS,
    refused=(),
    accepted=(
        *_SWIGLU,
        "apply_router_weight_on_input",
        "ckpt_down_proj_name",
        "ckpt_gate_proj_name",
        "ckpt_up_proj_name",
        "custom_routing_function",
        "e_score_correction_bias",
        "expert_map_manager",
        "hash_indices_table",  # the router's; from 0.33 on
        "is_fused_checkpoint_transposed",
        "layer_name",
        "moe_config",
        "num_expert_group",
        "params_dtype",
        "quant_config",
        "renormalize",
        "routed_scaling_factor",
        "scoring_func",
        "topk_group",
        "use_grouped_topk",
    ),
)
EXPERT_CONFIG = Arguments(
    MOE_CONFIG,
    refused=(
        Refusal("is_lora_enabled", (False,), "LoRA on experts"),
        Refusal("intermediate_pad", (None, 0), "padding of the intermediate size"),
        Refusal(
            "_defer_moe_finalize",
            (False,),
            "leaving the sum over experts to the model",
            versions=">=0.32",
        ),
        Refusal("use_mxfp4_w4a4_dsv4", (False,), "MXFP4 activations", versions=">=0.32"),
    ),
    accepted=(
        *_SWIGLU,
        "activation",
        "activation_situ_beta",
        "activation_situ_linear_beta",
        "aiter_fmoe_shared_expert_enabled",
        "defer_moe_finalize_max_num_tokens",
        "device",
        "elastic_ep_max_dp_size",
        "experts_per_token",
        "has_bias",
        "has_hash_routing",
        "hidden_dim",
        "hidden_dim_unpadded",
        "in_dtype",
        "intermediate_size",
        "intermediate_size_per_partition",
        "intermediate_size_per_partition_unpadded",
        "max_capture_size",
        "max_num_tokens",
        "moe_backend",
        "moe_parallel_config",
        "num_experts",
        "num_local_experts",
        "num_logical_experts",
        "require_decomposed_backend",  # of the kernels for hot experts; from 0.33 on
        "rocm_aiter_fmoe_enabled",
        "router_logits_dtype",
        "routing_method",
        "shared_expert_prefix",
        "skip_final_all_reduce",
        "tp_shard_with_padding",
    ),
)
EXPERT_RANKS = Arguments(
    f"{LAYERS}.config:FusedMoEParallelConfig",
    refused=(
        Refusal("dp_size", (1,), "data parallelism"),
        Refusal("ep_size", (1,), "expert parallelism"),
        Refusal("use_ep", (False,), "expert parallelism"),
        Refusal("pcp_size", (1,), "prefill context parallelism"),
        Refusal("sp_size", (1,), "sequence parallelism"),
        Refusal("enable_eplb", (False,), "moving experts between ranks"),
    ),
    accepted=("all2all_backend", "dp_rank", "ep_rank", "pcp_rank", "tp_rank", "tp_size"),
)
