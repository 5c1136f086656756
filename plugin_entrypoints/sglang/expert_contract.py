"""The part of SGLang's contract about its expert layers: what models request of their experts, how
they are loaded, which routes they get, and how ``kt model check`` gives them weights.

See ``contract.py``, which includes this part.
"""

from ..contract import Arguments, Attributes, Name, Refusal

SRT = "sglang.srt"
FUSED_MOE = f"{SRT}.layers.moe.fused_moe_triton.layer"
KT_WRAPPER = f"{SRT}.layers.moe.kt_ep_wrapper"

_LAYER = (Refusal("no_combine", (False,), "one result per expert"),)
_COMMON = (
    "activation",  # see kt_kernel.serving.activations, also for the next six
    "apply_router_weight_on_input",
    "is_gated",
    "gemm1_alpha",
    "gemm1_beta",
    "gemm1_clamp_limit",
    "swiglu_limit",
    "gate_up_interleaved",  # used only by activations with an alpha or a limit
    "hidden_size",
    "inplace",
    "layer_id",
    "num_experts",
    "num_fused_shared_experts",  # refused if some experts are cold
    "params_dtype",
    "routed_scaling_factor",
    "routing_method_type",  # for kernels that do the routing, which are refused
    "top_k",
)
EXPERT_ARGUMENTS = Arguments(
    f"{FUSED_MOE}:FusedMoE",
    refused=(
        *_LAYER,
        Refusal("use_presharded_weights", (False,), "a checkpoint with one part per rank"),
        Refusal("use_weight_loader_fused", (False,), "a stacked checkpoint"),
    ),
    accepted=(
        *_COMMON,
        "enable_qwen35_fp8_deferred_finalize",  # for FlashInfer's kernels, which are refused
        "intermediate_size",
        "prefix",
        "quant_config",
        "quant_method",  # whose class is checked
        "reduce_results",
        "with_bias",
        "uses_expert_location",  # which is the trivial one
    ),
)
EXPERT_CONFIG = Arguments(
    f"{SRT}.layers.moe.moe_runner.base:MoeRunnerConfig",
    refused=(
        *_LAYER,
        Refusal(
            "no_combine_keep_router_weight", (False,), "one result per expert", versions=">=0.5.23"
        ),
        Refusal("silu_mul_keep_fp32", (False,), "a float32 activation", versions=">=0.5.21"),
        Refusal("use_tp_all_gather_activation", (False,), "an activation gathered by ranks"),
    ),
    accepted=(
        *_COMMON,
        "intermediate_size_per_partition",
        "layer",
        "num_local_experts",
        "runner_backend",
    ),
)
LOADING = (
    Name(
        f"{FUSED_MOE}:FusedMoE.weight_loader",
        "replaced",
        "sees the weights of experts from models that call it, in place of the parameter's",
    ),
    Name(
        f"{FUSED_MOE}:FusedMoE._weight_loader_impl",
        "called",
        "loads one matrix of a hot expert into a given slot",
    ),
    Name(
        f"{SRT}.model_loader.loader:DefaultModelLoader.load_weights_and_postprocess",
        "replaced",
        "sets random weights of a class that transformers does not know",
        without="kt model check does not work for such classes",
    ),
    *(
        Name(
            f"{SRT}.model_loader.loader:{name}",
            "called",
            "computes what a class derives from its weights, as MLA does",
            versions,
            without="kt model check does not work for such classes",
        )
        for name, versions in (
            ("post_load_weights", ">=0.5.21"),
            ("_post_load_weights", "<0.5.21"),
        )
    ),
)
ROUTING = (
    Name(f"{SRT}.layers.moe.topk:StandardTopKOutput", "called", "its routes"),
    Name(
        f"{SRT}.layers.moe.topk:TopKOutputChecker.format_is_standard",
        "called",
        "distinguishes computed routing from routing left to a fused kernel",
    ),
    Name(f"{SRT}.layers.moe.topk:TopKOutputChecker.format_is_bypassed", "called", "the same"),
    Name(
        f"{SRT}.layers.moe.topk:TopKOutputChecker.format_is_packed",
        "called",
        "distinguishes routes whose numbers and weights share 32 bits, as in Inkling",
    ),
)
ROUTES = (
    Attributes(
        f"{SRT}.layers.moe.topk:StandardTopKOutput",
        ("topk_ids", "topk_weights"),
        "a batch's routes",
    ),
    Attributes(f"{SRT}.layers.moe.topk:BypassedTopKOutput", ("to_standard",), "a batch's routes"),
    Attributes(
        f"{SRT}.layers.moe.topk:PackedTopKOutput",
        ("packed_topk_ids", "router_logits"),
        "a batch's routes",
    ),
)
# What the layer passes to the creation of its weights.
EXPERT_WEIGHTS = Arguments(
    f"{KT_WRAPPER}:KTEPWrapperMethod",
    refused=(),
    accepted=("moe_intermediate_size", "weight_loader", "with_bias"),
)
