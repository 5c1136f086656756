"""Ledger of every place where a plugin takes hold of an engine.

Nothing of an engine is touched that is not listed here. `missing` looks each target up in the
engine at hand, so that one that renamed it stops the start instead of serving without the plugin.
"""

from dataclasses import dataclass
from importlib import import_module


@dataclass(frozen=True)
class Hook:
    """engine: "vllm" or "sglang". target: "module:attribute.path" as it is in the engine.
    how: wrapped, subclassed, replaced or read. versions: those it was run with. until: what would
    let us drop it. needed: whether a version without the target cannot be served."""

    engine: str
    target: str
    how: str
    why: str
    versions: str
    until: str
    needed: bool = True


_VLLM_TRIED = "0.26.0 (GPU), 0.32.0 (CPU)"
_VLLM_PADDING = "0.26.0 (GPU), 0.32.0 (CPU, looked up)"  # batches are not padded on a CPU
_SGLANG_TRIED = "0.5.17 (GPU), 0.5.23 (CPU)"
_MOE = "vllm.model_executor.layers.fused_moe"
_SGLANG_ARGUMENTS = "sglang.srt.server_args:ServerArgs"
_SGLANG_MOE = "sglang.srt.layers.moe"
_SGLANG_RUN = "sglang.srt.model_executor"

HOOKS: list[Hook] = [
    Hook(
        "vllm",
        "vllm.engine.arg_utils:EngineArgs.add_cli_args",
        "wrapped",
        "the --kt-* flags",
        _VLLM_TRIED,
        "vLLM lets plugins add arguments",
    ),
    Hook(
        "vllm",
        "vllm.engine.arg_utils:EngineArgs.from_cli_args",
        "wrapped",
        'puts the flags, checked, into additional_config["kt"], which reaches every worker',
        _VLLM_TRIED,
        "vLLM lets plugins add arguments",
    ),
    Hook(
        "vllm",
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        "wrapped",
        "refuses, before an engine process starts, what the hybrid layer cannot serve",
        _VLLM_TRIED,
        "vLLM calls plugins with the finished configuration",
    ),
    Hook(
        "vllm",
        f"{_MOE}.routed_experts:RoutedExperts",
        "subclassed, registered out of tree",
        "allocates the hot experts only, takes the cold ones' weights, adds their output",
        _VLLM_TRIED,
        "stays: it is vLLM's own extension point",
    ),
    Hook(
        "vllm",
        f"{_MOE}.runner.moe_runner:MoERunner._select_forward",
        "wrapped",
        "on the CPU torch.compile would trace into our layer; the opaque operator hides it",
        _VLLM_TRIED,
        "the CPU platform uses the opaque operator like the others",
    ),
    Hook(
        "vllm",
        "vllm.model_executor.custom_op:op_registry_oot",
        "read",
        "notices another plugin that has taken RoutedExperts",
        _VLLM_TRIED,
        "register_oot names the conflict itself",
    ),
    Hook(
        "vllm",
        f"{_MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.process_weights_after_loading",
        "wrapped per instance",
        "the moment when all weights of a layer have arrived",
        _VLLM_TRIED,
        "RoutedExperts gets such a call itself",
    ),
    Hook(
        "vllm",
        "vllm.model_executor.layers.quantization.fp8:Fp8MoEMethod.process_weights_after_loading",
        "wrapped per instance",
        "the same, of a model in FP8",
        "0.26.0 (GPU)",
        "RoutedExperts gets such a call itself",
    ),
    Hook(
        "vllm",
        f"{_MOE}.fused_moe_method_base:FusedMoEMethodBase.maybe_make_prepare_finalize",
        "replaced per instance",
        "without hot experts no kernel of vLLM's is made, not late either",
        "0.26.0 (GPU)",
        "the oldest version is one without it",
        needed=False,
    ),
    Hook(
        "vllm",
        "vllm.forward_context:get_forward_context",
        "called",
        "leads to the slots in the KV cache (slot_mapping, no_compile_layers): padding has none",
        _VLLM_PADDING,
        "the oldest version tells which rows are padding",
    ),
    Hook(
        "vllm",
        "vllm.model_executor.layers.attention:Attention",
        "read",
        "a layer in whose KV cache each token has a slot",
        _VLLM_PADDING,
        "the oldest version tells which rows are padding",
        needed=False,
    ),
    Hook(
        "vllm",
        "vllm.model_executor.layers.attention:MLAAttention",
        "read",
        "the same, of DeepSeek's models",
        _VLLM_PADDING,
        "the oldest version tells which rows are padding",
        needed=False,
    ),
    Hook(
        "vllm",
        "vllm.config:CacheConfig.kv_sharing_fast_prefill",
        "read",
        "with it a layer's rows are not those of the batch",
        _VLLM_PADDING,
        "vLLM drops the option",
        needed=False,
    ),
    Hook(
        "vllm",
        "vllm.config:ParallelConfig.decode_context_parallel_size",
        "read",
        "with more than one rank a token has no slot on the others",
        _VLLM_PADDING,
        "the oldest version tells which rows are padding",
        needed=False,
    ),
    Hook(
        "vllm",
        "vllm.config:AttentionConfig.hisparse_config",
        "read",
        "with it tokens whose keys are on the host have no slot",
        "0.32.0 (looked up)",
        "the oldest version tells which rows are padding",
        needed=False,
    ),
    Hook(
        "sglang",
        f"{_SGLANG_ARGUMENTS}.add_cli_args",
        "hooked after",
        "the --kt-* flags that SGLang lacks; its own lose their defaults, to see which are given",
        _SGLANG_TRIED,
        "SGLang lets plugins add arguments",
    ),
    Hook(
        "sglang",
        f"{_SGLANG_ARGUMENTS}.from_cli_args",
        "hooked around",
        "checks the flags, in one line, and keeps them in a private attribute for the workers",
        _SGLANG_TRIED,
        "SGLang lets plugins add arguments",
    ),
    Hook(
        "sglang",
        f"{_SGLANG_ARGUMENTS}.check_server_args",
        "hooked after",
        "refuses, before a worker starts, what the hybrid layer cannot serve",
        _SGLANG_TRIED,
        "SGLang calls plugins with the finished arguments",
    ),
    Hook(
        "sglang",
        "sglang.srt.model_loader.loader:_initialize_model",
        "hooked around",
        "the layers of one model, in their order, share one HybridModel",
        _SGLANG_TRIED,
        "create_kt_config_from_server_args is told which model a layer belongs to",
    ),
    Hook(
        "sglang",
        f"{_SGLANG_MOE}.kt_ep_wrapper:create_kt_config_from_server_args",
        "replaced",
        "SGLang's own wants --kt-weight-path, and knows no other source of options",
        _SGLANG_TRIED,
        "SGLang's own takes kt options without a weight path",
    ),
    Hook(
        "sglang",
        f"{_SGLANG_MOE}.kt_ep_wrapper:KTEPWrapperMethod",
        "replaced by a subclass",
        "SGLang's own passes no mask of experts, has no CPU path, reads weights a second time and "
        "multiplies by routed_scaling_factor twice on CUDA",
        _SGLANG_TRIED,
        "SGLang's own takes a HybridLayer",
    ),
    Hook(
        "sglang",
        f"{_SGLANG_MOE}.fused_moe_triton.layer:FusedMoE._weight_loader_impl",
        "called",
        "loads one matrix of a hot expert into a given slot",
        _SGLANG_TRIED,
        "stays",
    ),
    Hook(
        "sglang",
        f"{_SGLANG_MOE}.fused_moe_triton.layer:KTEPWrapperMethod",
        "read",
        "the layer's own reference to the class: the hook must have reached it",
        _SGLANG_TRIED,
        "a failed hook stops SGLang",
    ),
    Hook(
        "sglang",
        f"{_SGLANG_MOE}.topk:TopKOutputChecker.format_is_standard",
        "called",
        "tells routing that was computed from routing left to a fused kernel",
        _SGLANG_TRIED,
        "stays",
    ),
    Hook(
        "sglang",
        "sglang.srt.runtime_context:get_server_args",
        "called",
        "where a worker finds the options",
        _SGLANG_TRIED,
        "stays",
    ),
    Hook(
        "sglang",
        "sglang.srt.runtime_context:get_context",
        "called",
        "whether, and where, processes read arguments that were decided on",
        _SGLANG_TRIED,
        "SGLang calls plugins with the finished arguments",
    ),
    Hook(
        "sglang",
        f"{_SGLANG_ARGUMENTS}.override",
        "called",
        "records that shared experts are not fused, with SGLang's own decisions",
        "0.5.17 (GPU)",
        "the oldest version is one without it",
        needed=False,
    ),
    Hook(
        "sglang",
        "sglang.srt.arg_groups.overrides:declare_resolution",
        "called",
        "the same, in newer versions",
        "0.5.23 (CPU)",
        "a layer of SGLang's says itself that it takes no fused shared experts",
        needed=False,
    ),
    *(
        Hook(
            "sglang",
            f"sglang.srt.models.{model}:KTEPWrapperMethod",
            "replaced by a class without instances",
            "these models multiply what such a layer returns by routed_scaling_factor, two of them "
            "in one of two ways through their layer only",
            _SGLANG_TRIED,
            "models leave the factor to the layer",
            needed=False,
        )
        for model in ("deepseek_v2", "glm4_moe", "glm4_moe_lite")
    ),
    Hook(
        "sglang",
        f"{_SGLANG_RUN}.cuda_graph_buffer_registry:CudaGraphBufferRegistry.fill_from",
        "hooked around",
        "is told how many rows of a graph's batch are tokens, which decides what padding costs",
        _SGLANG_TRIED,
        "a layer is told which rows are padding",
        needed=False,
    ),
    *(
        Hook(
            "sglang",
            f"{_SGLANG_RUN}.runner.{module}:{runner}.capture",
            "hooked around",
            "batches are dummies meanwhile, of which the CPU is to compute nothing",
            _SGLANG_TRIED,
            "a layer is told which rows are padding",
            needed=False,
        )
        for module, runner in (
            ("decode_cuda_graph_runner", "DecodeCudaGraphRunner"),
            ("prefill_cuda_graph_runner", "PrefillCudaGraphRunner"),
        )
    ),
    Hook(
        "sglang",
        "sglang.srt.plugins.hook_registry:HookRegistry.register",
        "called",
        "SGLang's own way to hook its functions",
        _SGLANG_TRIED,
        "stays: it is SGLang's own extension point",
    ),
    Hook(
        "sglang",
        "sglang.srt.layers.quantization.unquant:UnquantizedFusedMoEMethod",
        "read",
        "a method of hot experts that is tested; others are refused",
        _SGLANG_TRIED,
        "stays",
    ),
    Hook(
        "sglang",
        "sglang.srt.layers.quantization.fp8:Fp8MoEMethod",
        "read",
        "a method of hot experts that is tested; others are refused",
        "0.5.17 (GPU)",
        "stays",
    ),
    Hook(
        "sglang",
        f"{_SGLANG_MOE}.token_dispatcher:StandardCombineInput",
        "called",
        "what a layer returns",
        _SGLANG_TRIED,
        "stays",
    ),
]


def missing(engine: str) -> list[str]:
    """Needed targets of one engine's hooks that do not exist in the installed version."""
    return [
        hook.target
        for hook in HOOKS
        if hook.engine == engine and hook.needed and not _exists(hook.target)
    ]


def _exists(target: str) -> bool:
    module, _, path = target.partition(":")
    try:
        found = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return False
    return True
