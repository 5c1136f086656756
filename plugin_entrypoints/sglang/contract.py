"""The contract with SGLang: all that the plugin relies on in it. See ``../contract.py``.

This is the file to read, and to change, for a new release of SGLang.
"""

from ..common import LOAD_FORMATS, NO_EXCHANGE, SINGLE_RANK
from ..contract import Contract, Name, Refusal

_PLACES = "both decide where experts are kept"
_LORA = "LoRA is not supported together with kt options yet"
_BATCHES = "the CPU works on one batch at a time"
_NO_COMPILER = "our kernels are no torch operations"

NAMES = (
    Name(
        "sglang.srt.server_args:ServerArgs.add_cli_args",
        "wrapped",
        "the --kt-* flags that SGLang lacks; its own lose their defaults, to see which are given",
        until="SGLang lets plugins add arguments",
    ),
    Name(
        "sglang.srt.server_args:ServerArgs.from_cli_args",
        "wrapped",
        "checks the flags, in one line, and keeps them in a private attribute for the workers",
        until="SGLang lets plugins add arguments",
    ),
    Name(
        "sglang.srt.server_args:ServerArgs.check_server_args",
        "wrapped",
        "refuses, before a worker starts, what the hybrid layer cannot serve",
        until="SGLang calls plugins with the finished arguments",
    ),
    Name(
        "sglang.srt.model_loader.loader:_initialize_model",
        "wrapped",
        "the layers of one model, in their order, share one HybridModel",
        until="create_kt_config_from_server_args is told which model a layer belongs to",
    ),
    Name(
        "sglang.srt.layers.moe.kt_ep_wrapper:create_kt_config_from_server_args",
        "replaced",
        "SGLang's own wants --kt-weight-path, and knows no other source of options",
        until="SGLang's own takes kt options without a weight path",
    ),
    Name(
        "sglang.srt.layers.moe.kt_ep_wrapper:KTEPWrapperMethod",
        "replaced",
        "SGLang's own passes no mask of experts, has no CPU path, reads weights a second time and multiplies by routed_scaling_factor twice on CUDA",
        until="SGLang's own takes a HybridLayer",
    ),
    Name(
        "sglang.srt.layers.moe.fused_moe_triton.layer:FusedMoE._weight_loader_impl",
        "called",
        "loads one matrix of a hot expert into a given slot",
    ),
    Name(
        "sglang.srt.layers.moe.fused_moe_triton.layer:KTEPWrapperMethod",
        "read",
        "the layer's own reference to the class: the hook must have reached it",
        until="a failed hook stops SGLang",
    ),
    Name(
        "sglang.srt.layers.moe.topk:TopKOutputChecker.format_is_standard",
        "called",
        "tells routing that was computed from routing left to a fused kernel",
    ),
    Name(
        "sglang.srt.runtime_context:get_server_args", "called", "where a worker finds the options"
    ),
    Name(
        "sglang.srt.runtime_context:get_context",
        "called",
        "whether, and where, processes read arguments that were decided on",
        until="SGLang calls plugins with the finished arguments",
    ),
    Name(
        "sglang.srt.server_args:ServerArgs.override",
        "called",
        "records that shared experts are not fused, with SGLang's own decisions",
        versions="",
        until="the oldest version is one without it",
    ),
    Name(
        "sglang.srt.arg_groups.overrides:declare_resolution",
        "called",
        "the same, in newer versions",
        versions="",
        until="a layer of SGLang's says itself that it takes no fused shared experts",
    ),
    Name(
        "sglang.srt.models.deepseek_v2:KTEPWrapperMethod",
        "replaced",
        "these models multiply what such a layer returns by routed_scaling_factor, two of them in one of two ways through their layer only",
        versions="",
        until="models leave the factor to the layer",
    ),
    Name(
        "sglang.srt.models.glm4_moe:KTEPWrapperMethod",
        "replaced",
        "these models multiply what such a layer returns by routed_scaling_factor, two of them in one of two ways through their layer only",
        versions="",
        until="models leave the factor to the layer",
    ),
    Name(
        "sglang.srt.models.glm4_moe_lite:KTEPWrapperMethod",
        "replaced",
        "these models multiply what such a layer returns by routed_scaling_factor, two of them in one of two ways through their layer only",
        versions="",
        until="models leave the factor to the layer",
    ),
    Name(
        "sglang.srt.model_executor.cuda_graph_buffer_registry:CudaGraphBufferRegistry.fill_from",
        "wrapped",
        "is told how many rows of a graph's batch are tokens, which decides what padding costs",
        versions="",
        until="a layer is told which rows are padding",
    ),
    Name(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.capture",
        "wrapped",
        "batches are dummies meanwhile, of which the CPU is to compute nothing",
        versions="",
        until="a layer is told which rows are padding",
    ),
    Name(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner:PrefillCudaGraphRunner.capture",
        "wrapped",
        "batches are dummies meanwhile, of which the CPU is to compute nothing",
        versions="",
        until="a layer is told which rows are padding",
    ),
    Name(
        "sglang.srt.plugins.hook_registry:HookRegistry.register",
        "called",
        "SGLang's own way to hook its functions",
    ),
    Name(
        "sglang.srt.layers.quantization.unquant:UnquantizedFusedMoEMethod",
        "read",
        "a method of hot experts that is tested; others are refused",
    ),
    Name(
        "sglang.srt.layers.quantization.fp8:Fp8MoEMethod",
        "read",
        "a method of hot experts that is tested; others are refused",
    ),
    Name(
        "sglang.srt.layers.moe.token_dispatcher:StandardCombineInput",
        "called",
        "what a layer returns",
    ),
)
# Checked on the resolved server arguments.
REFUSED = (
    Refusal("pp_size", (1,), SINGLE_RANK),
    Refusal("dp_size", (1,), SINGLE_RANK),
    Refusal("ep_size", (1,), SINGLE_RANK),
    Refusal("attn_dp_size", (1, None), SINGLE_RANK),
    Refusal("enable_dp_attention", (False,), SINGLE_RANK),
    Refusal("attn_cp_size", (1, None), SINGLE_RANK),  # rows come to a layer in another order
    Refusal("moe_dp_size", (1,), SINGLE_RANK),
    Refusal("enable_prefill_cp", (False,), SINGLE_RANK),
    Refusal(
        "moe_a2a_backend", ("none", None), "expert-parallel dispatch does not know CPU experts"
    ),
    Refusal("enable_eplb", (False,), "moving experts between ranks does not know CPU experts"),
    Refusal("ep_num_redundant_experts", (0,), "redundant experts are not supported"),
    Refusal("init_expert_location", ("trivial",), "experts must be in the model's own order"),
    Refusal("elastic_ep_backend", (None, "none"), "expert parallelism is not supported"),
    Refusal("enable_paged_experts", (False,), _PLACES),
    Refusal("cpu_offload_gb", (0,), _PLACES),
    Refusal("offload_group_size", (-1, 0), _PLACES),
    Refusal("enable_lora", (None, False), _LORA),
    Refusal("lora_paths", (None, [], {}), _LORA),
    Refusal(
        "speculative_algorithm", (None,), "speculative decoding is not supported with kt options"
    ),
    Refusal(
        "dllm_algorithm", (None,), "diffusion decoding is not supported together with kt options"
    ),
    Refusal(
        "moe_runner_backend", ("auto", "triton"), "the hot experts' kernel must skip the cold ones"
    ),
    Refusal("model_impl", ("auto", "sglang"), "only SGLang's own model code is supported"),
    Refusal("enable_two_batch_overlap", (False,), _BATCHES),
    Refusal("enable_pdmux", (False,), _BATCHES),
    Refusal("enable_torch_compile", (False,), _NO_COMPILER),
    Refusal("device", ("cuda", "cpu"), "kt-moe runs beside CUDA devices, or on the CPU alone"),
    Refusal("load_format", LOAD_FORMATS, "the cold experts need their weights one by one"),
    Refusal("startup_weight_load_mode", ("serial",), "the cold experts load with the others"),
    Refusal("weight_cache_mode", ("off",), "the cache does not know CPU experts"),
    Refusal("custom_weight_loader", (None, []), NO_EXCHANGE),
    Refusal("enable_memory_saver", (False,), NO_EXCHANGE),
    Refusal("enable_weights_cpu_backup", (False,), NO_EXCHANGE),
)
# Checked where some experts are cold.
BESIDE_COLD = (
    Refusal(
        "enforce_shared_experts_fusion",
        (False,),
        "a shared expert among the routed ones has no place beside cold experts",
    ),
)


CONTRACT = Contract(
    engine="SGLang",
    package="sglang",
    supported=">=0.5.17,<0.5.24",
    tested={"0.5.17": "on a GPU", "0.5.23": "on the CPU"},
    names=NAMES,
    attributes=(),
    refusals=REFUSED,
)
