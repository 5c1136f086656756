"""The contract with vLLM: all that the plugin relies on in it. See ``../contract.py``.

This is the file to read, and to change, for a new release of vLLM.
"""

from ..common import LOAD_FORMATS, NO_EXCHANGE, SINGLE_RANK
from ..contract import Contract, Name, Refusal

_TOGETHER = "not supported together with kt options yet"
_PLACES = "both decide where weights are kept"

NAMES = (
    Name(
        "vllm.engine.arg_utils:EngineArgs.add_cli_args",
        "wrapped",
        "the --kt-* flags",
        until="vLLM lets plugins add arguments",
    ),
    Name(
        "vllm.engine.arg_utils:EngineArgs.from_cli_args",
        "wrapped",
        'puts the flags, checked, into additional_config["kt"], which reaches every worker',
        until="vLLM lets plugins add arguments",
    ),
    Name(
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        "wrapped",
        "refuses, before an engine process starts, what the hybrid layer cannot serve",
        until="vLLM calls plugins with the finished configuration",
    ),
    Name(
        "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts",
        "subclassed",
        "allocates the hot experts only, takes the cold ones' weights, adds their output",
    ),
    Name(
        "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner._select_forward",
        "wrapped",
        "on the CPU torch.compile would trace into our layer; the opaque operator hides it",
        until="the CPU platform uses the opaque operator like the others",
    ),
    Name(
        "vllm.model_executor.custom_op:op_registry_oot",
        "read",
        "notices another plugin that has taken RoutedExperts",
        until="register_oot names the conflict itself",
    ),
    Name(
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.process_weights_after_loading",
        "wrapped",
        "the moment when all weights of a layer have arrived",
        until="RoutedExperts gets such a call itself",
    ),
    Name(
        "vllm.model_executor.layers.quantization.fp8:Fp8MoEMethod.process_weights_after_loading",
        "wrapped",
        "the same, of a model in FP8",
        until="RoutedExperts gets such a call itself",
    ),
    Name(
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.maybe_make_prepare_finalize",
        "replaced",
        "without hot experts no kernel of vLLM's is made, not late either",
        versions="",
        until="the oldest version is one without it",
    ),
    Name(
        "vllm.forward_context:get_forward_context",
        "called",
        "leads to the slots in the KV cache (slot_mapping, no_compile_layers): padding has none",
        until="the oldest version tells which rows are padding",
    ),
    Name(
        "vllm.model_executor.layers.attention:Attention",
        "read",
        "a layer in whose KV cache each token has a slot",
        versions="",
        until="the oldest version tells which rows are padding",
    ),
    Name(
        "vllm.model_executor.layers.attention:MLAAttention",
        "read",
        "the same, of DeepSeek's models",
        versions="",
        until="the oldest version tells which rows are padding",
    ),
    Name(
        "vllm.config:CacheConfig.kv_sharing_fast_prefill",
        "read",
        "with it a layer's rows are not those of the batch",
        versions="",
        until="vLLM drops the option",
    ),
    Name(
        "vllm.config:ParallelConfig.decode_context_parallel_size",
        "read",
        "with more than one rank a token has no slot on the others",
        versions="",
        until="the oldest version tells which rows are padding",
    ),
    Name(
        "vllm.config:AttentionConfig.hisparse_config",
        "read",
        "with it tokens whose keys are on the host have no slot",
        versions="",
        until="the oldest version tells which rows are padding",
    ),
)
REFUSED = (
    Refusal("parallel_config.pipeline_parallel_size", (1,), SINGLE_RANK),
    Refusal("parallel_config.data_parallel_size", (1,), SINGLE_RANK),
    Refusal("parallel_config.prefill_context_parallel_size", (1,), SINGLE_RANK),
    Refusal("parallel_config.enable_expert_parallel", (False,), _TOGETHER),
    Refusal("parallel_config.enable_eplb", (False,), _TOGETHER),
    Refusal("parallel_config.enable_dbo", (False,), _TOGETHER),
    Refusal("parallel_config.ubatch_size", (0, 1), _TOGETHER),
    Refusal("lora_config", (None,), _TOGETHER, "--enable-lora"),
    Refusal("speculative_config", (None,), _TOGETHER),
    Refusal("weight_transfer_config", (None,), NO_EXCHANGE),
    Refusal("model_config.enable_sleep_mode", (False,), NO_EXCHANGE),
    Refusal("model_config.model_impl", ("auto", "vllm"), "only vLLM's own model code is supported"),
    Refusal("offload_config.uva.cpu_offload_gb", (0,), _PLACES),
    Refusal("cache_config.cpu_offload_gb", (0,), _PLACES),  # where older versions have it
    Refusal("offload_config.prefetch.offload_group_size", (0,), _PLACES),
    Refusal("offload_config.offload_backend", ("auto", "uva"), _PLACES),
    Refusal(
        "load_config.load_format", LOAD_FORMATS, "the cold experts need their weights one by one"
    ),
)


CONTRACT = Contract(
    engine="vLLM",
    package="vllm",
    supported=">=0.26,<0.34",
    tested={"0.26.0": "on a GPU", "0.32.0": "on the CPU"},
    names=NAMES,
    attributes=(),
    refusals=REFUSED,
)
