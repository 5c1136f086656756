"""The contract with vLLM: everything that the plugin relies on. See ``../contract.py``.

This is the file to read, and to change, for a new release of vLLM, with `expert_contract` (the
experts' arguments) and `settings_contract` (settings that are refused).
"""

from ..common import (
    HOLDS_A_PART,
    KEEPS_MEMORY,
    KEEPS_WEIGHTS,
    NO_LORA,
    NO_SCALING,
)
from ..contract import Attributes, Contract, Name, Operation, Operations
from .expert_contract import (
    EXPERT_ARGUMENTS,
    EXPERT_CONFIG,
    EXPERT_RANKS,
    EXPERTS,
    LAYERS,
    MOE_CONFIG,
)
from .settings_contract import REFUSED

_MORE_WORK = "padding is computed like tokens"
_PROBES = "serves small models of a class and reads their log-probabilities"
_NO_PROBE = "kt model check does not work"
_PADDING = "the oldest version passes the padding rows to a layer"

_ARGUMENTS = "vllm.engine.arg_utils:EngineArgs"
_RUNNER = f"{LAYERS}.runner.moe_runner:MoERunner"

NAMES = (
    # The processes that the user starts.
    Name(
        f"{_ARGUMENTS}.add_cli_args",
        "wrapped",
        "the --kt-* flags",
        until="vLLM lets plugins add arguments",
    ),
    Name(
        f"{_ARGUMENTS}.from_cli_args",
        "wrapped",
        'puts the flags, checked, into additional_config["kt"], which reaches every worker',
        until="vLLM lets plugins add arguments",
    ),
    Name(
        f"{_ARGUMENTS}.create_engine_config",
        "wrapped",
        "refuses, before an engine process starts, what the hybrid layer cannot serve",
        until="vLLM calls plugins with the finished configuration",
    ),
    Name(
        "vllm.v1.engine.async_llm:AsyncLLM.__init__",
        "wrapped",
        "a server's engine refuses requests that would change or move weights",
        until="vLLM asks plugins about such requests",
    ),
    Name(
        "vllm.v1.engine.llm_engine:LLMEngine.__init__",
        "wrapped",
        "the same, for engines of Python programs",
        until="vLLM asks plugins about such requests",
    ),
    Name(
        "vllm.v1.engine.utils:wait_for_engine_startup",
        "wrapped",
        "reports the error line of the worker that failed",
        until="vLLM reports why a process of an engine has ended",
    ),
    # The engine's processes.
    Name(
        "vllm.v1.executor.abstract:Executor.__init__",
        "wrapped",
        "reports the error line of the worker that failed",
        until="vLLM reports why a process of an engine has ended",
    ),
    Name(
        "vllm.v1.worker.worker_base:WorkerBase.__init__",
        "wrapped",
        "where a worker gets the configuration; wraps its methods that load the model, start, and "
        "change or move weights",
        until="vLLM calls plugins with a worker and its configuration",
    ),
    Name(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.reload_weights",
        "replaced",
        "refused in the runner, too, because custom code can reach it",
        until="vLLM asks plugins about such requests",
    ),
    Name(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.reload_weights",
        "replaced",
        "the same for vLLM's second runner",
        until="vLLM asks plugins about such requests",
    ),
    # The model.
    Name(LAYERS, "read", "imported first: vLLM's modules import each other in a circle"),
    Name(
        f"{EXPERTS}.register_oot",
        "called",
        "allocates only the hot experts, receives the weights of cold ones, adds their output",
    ),
    Name(
        f"{EXPERTS}.weight_loader.supports_moe_loading",
        "wrapped",
        "receives each expert's matrices; vLLM reads this mark from the function",
    ),
    Name(f"{EXPERTS}.forward_modular", "wrapped", "computes a batch whose experts are selected"),
    Name(
        f"{EXPERTS}._map_global_expert_id_to_local_expert_id",
        "replaced",
        "an expert's row in vLLM's weights",
    ),
    Name(f"{EXPERTS}.expert_map", "wrapped", "through which vLLM's kernel skips cold routes"),
    Name(
        f"{EXPERTS}._get_quant_method",
        "wrapped",
        "without hot experts, no kernel of the checkpoint's format is selected",
        until="vLLM selects kernels when a layer has weights",
        without="quantised models need a kernel of vLLM even if no expert is hot",
    ),
    Name(
        f"{LAYERS}.fused_moe_method_base:FusedMoEMethodBase.create_weights",
        "subclassed",
        "the method of a layer without hot experts",
    ),
    Name(
        "vllm.model_executor.models.gpt_oss:GptOssRoutedExperts",
        "subclassed",
        "experts that differ in loading only",
        versions=">=0.32",
        without="gpt-oss is not served",
    ),
    Name(
        "vllm.model_executor.models.transformers.moe:TransformersRoutedExperts",
        "subclassed",
        "experts of models whose code is transformers', which differ in names only",
        without="--model-impl transformers does not work",
    ),
    Name(
        "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.get_all_weights",
        "wrapped",
        "models do not get the weights of experts that kt-moe reads itself",
        until="vLLM asks layers which weights they need",
    ),
    Name(
        f"{_RUNNER}._select_forward",
        "wrapped",
        "on the CPU, torch.compile would trace into our layer; the opaque operator prevents it",
        until="the CPU platform uses the opaque operator like the others",
    ),
    Name("torch:ops.vllm.moe_forward", "called", "that operator"),
    Name("torch:ops.vllm.moe_forward_shared", "called", "that operator, with shared experts"),
    Name(
        "vllm.model_executor.custom_op:op_registry_oot",
        "read",
        "shows whether another plugin has replaced RoutedExperts; our class is removed afterwards",
        until="register_oot reports the conflict itself and can be undone",
    ),
    Name(
        f"{LAYERS}.experts.triton_moe:TritonExperts",
        "read",
        "a kernel that skips experts that the expert map marks as remote",
    ),
    Name(
        f"{LAYERS}.fused_moe:_prepare_expert_assignment",
        "called",
        "gives the largest batch for which that kernel uses the routes unchanged",
    ),
    Name(
        f"{LAYERS}.fused_moe:fused_experts",
        "called",
        "computes streamed experts, and hot ones in 4 or 8 bits",
    ),
    Name(
        f"{LAYERS}:override_config",
        "called",
        "blocks of columns that vLLM's kernel for 4 bits accepts",
        until="vLLM chooses such blocks for groups of 32",
    ),
    Name(f"{LAYERS}.fused_moe:should_moe_wna16_use_cuda", "called", "whether it uses that kernel"),
    Name(f"{LAYERS}.config:int4_w4a16_moe_quant_config", "called", "describes those in 4 bits"),
    Name(f"{LAYERS}.config:biased_moe_quant_config", "called", "gives biases to streamed experts"),
    Name(f"{LAYERS}.activation:MoEActivation", "called", "what streamed experts compute"),
    Name(f"{LAYERS}.config:int8_w8a16_moe_quant_config", "called", "describes those in 8 bits"),
    Name(
        f"{LAYERS}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod"
        ".process_weights_after_loading",
        "wrapped",
        "called when all weights of a layer are loaded",
        until="RoutedExperts gets such a call itself",
    ),
    Name(
        "vllm.model_executor.layers.quantization.fp8:Fp8MoEMethod.process_weights_after_loading",
        "wrapped",
        "the same for models in FP8",
        until="RoutedExperts gets such a call itself",
    ),
    Name(
        f"{LAYERS}.fused_moe_method_base:FusedMoEMethodBase.maybe_make_prepare_finalize",
        "replaced",
        "with no hot expert, vLLM must create no kernel, now or later",
        versions="<0.27",
        until="the oldest version is one without it",
    ),
    Name("vllm.config:get_current_vllm_config", "called", "the options, while a model is built"),
    Name("vllm.model_executor.models.utils:extract_layer_index", "called", "a layer's number"),
    # kt model check.
    Name("vllm.entrypoints.llm:LLM.generate", "called", _PROBES, without=_NO_PROBE),
    Name(
        "vllm.model_executor.model_loader.default_loader:DefaultModelLoader.load_weights",
        "replaced",
        "sets random weights of a class that transformers does not know",
        without="kt model check does not work for such classes",
    ),
    Name("vllm.sampling_params:SamplingParams", "called", _PROBES, without=_NO_PROBE),
    Name(
        "vllm.distributed.parallel_state:cleanup_dist_env_and_memory",
        "called",
        "ends one small model before the next",
        without=_NO_PROBE,
    ),
    # Which rows are padding.
    Name(
        "vllm.forward_context:get_forward_context",
        "called",
        "holds the KV cache slots; padding has none",
        until=_PADDING,
        without=_MORE_WORK,
    ),
    Name(
        "vllm.model_executor.layers.attention:Attention.forward",
        "read",
        "a layer whose KV cache has a slot for each token",
        until=_PADDING,
        without=_MORE_WORK,
    ),
    Name(
        "vllm.model_executor.layers.attention:MLAAttention.forward",
        "read",
        "the same for DeepSeek's models",
        until=_PADDING,
        without=_MORE_WORK,
    ),
)
ATTRIBUTES = (
    Attributes("vllm.entrypoints.llm:LLM", ("llm_engine",), _PROBES, without=_NO_PROBE),
    Attributes(
        "vllm.outputs:RequestOutput", ("outputs", "prompt_logprobs"), _PROBES, without=_NO_PROBE
    ),
    Attributes(
        "vllm.outputs:CompletionOutput", ("logprobs", "token_ids"), _PROBES, without=_NO_PROBE
    ),
    Attributes("vllm.logprobs:Logprob", ("logprob",), _PROBES, without=_NO_PROBE),
    Attributes(_ARGUMENTS, ("additional_config",), "where the options travel"),
    Attributes(
        "vllm.config:VllmConfig",
        (
            "additional_config",
            "cache_config",
            "compilation_config",
            "device_config",
            "load_config",
            "model_config",
            "parallel_config",
            "scheduler_config",
            "speculative_config",
        ),
        "the options, and the settings they are checked against",
    ),
    Attributes(
        "vllm.config:ModelConfig",
        (
            "architectures",
            "hf_config",
            "hf_text_config",
            "max_model_len",
            "model",
            "quantization",
            "revision",
        ),
        "the model that the options are checked against",
    ),
    Attributes(
        "vllm.config:CacheConfig",
        ("gpu_memory_utilization", "kv_cache_memory_bytes"),
        "how much of the device's memory is left for streamed experts",
    ),
    Attributes(
        "vllm.config:SchedulerConfig",
        ("max_num_batched_tokens",),
        "whether any batch is large enough to be streamed",
    ),
    Attributes(
        "vllm.config:LoadConfig", ("download_dir",), "where the served model's repository is kept"
    ),
    Attributes(
        "vllm.config:ParallelConfig",
        ("worker_cls", "worker_extension_cls", "tensor_parallel_size"),
        "whether workers have custom methods, and whether experts may move",
    ),
    Attributes(
        "vllm.config:ParallelConfig",
        ("distributed_executor_backend", "nnodes", "world_size"),
        "how many workers on this machine must confirm that they loaded our layers",
    ),
    Attributes(
        "vllm.config:SpeculativeConfig",
        ("method", "draft_model_config"),
        "how tokens are predicted, and whether the draft model is quantised",
    ),
    Attributes("vllm.config:DeviceConfig", ("device_type",), "whether a trace can be made"),
    Attributes(
        "vllm.config:CompilationConfig",
        ("static_forward_context", "max_cudagraph_capture_size"),
        "the layers of the model that is being built, and the batches that are never streamed",
    ),
    Attributes(
        "vllm.v1.engine.async_llm:AsyncLLM",
        ("vllm_config", "collective_rpc", "engine_core"),
        "the engine's options; its calls of worker methods are checked; needed to stop it",
    ),
    Attributes(
        "vllm.v1.engine.llm_engine:LLMEngine",
        ("vllm_config", "collective_rpc", "engine_core"),
        "the same",
    ),
    Attributes(
        "vllm.v1.worker.gpu_worker:Worker",
        (
            "vllm_config",
            "model_runner",
            "get_model",
            "load_model",
            "determine_available_memory",
            "initialize_from_config",
            "compile_or_warm_up_model",
        ),
        "the worker's options, its start, and its model",
    ),
    Attributes(_RUNNER, ("routed_experts", "layer_name", "_shared_experts"), "its experts"),
    Attributes(
        EXPERTS,
        (
            "global_num_experts",
            "hidden_size",
            "layer_name",
            "moe_config",
            "quant_method",
            "top_k",
        ),
        "set up by its base class",
    ),
    Attributes(
        MOE_CONFIG,
        (
            "activation",
            "experts_per_token",
            "has_bias",
            "hidden_dim",
            "hidden_dim_unpadded",
            "intermediate_size_per_partition",
            "intermediate_size_per_partition_unpadded",
            "max_num_tokens",
            "moe_parallel_config",
            "num_experts",
            "num_local_experts",
            "num_logical_experts",
            "swiglu_alpha",
            "swiglu_beta",
            "swiglu_limit",
        ),
        "a layer's sizes and activation; the number of experts to allocate is set",
    ),
    Attributes(
        MOE_CONFIG,
        ("activation_situ_beta", "activation_situ_linear_beta"),
        "values of the activation SituGLU",
        versions=">=0.32",
    ),
    Attributes(f"{LAYERS}.config:FusedMoEParallelConfig", ("tp_rank", "tp_size"), "the ranks"),
    Attributes(
        f"{LAYERS}.expert_map_manager:ExpertMapManager",
        ("num_fused_shared_experts",),
        "whether shared experts are fused with the routed ones",
    ),
    Attributes(
        f"{LAYERS}.fused_moe_method_base:FusedMoEMethodBase",
        ("is_monolithic", "moe_kernel", "moe_quant_config"),
        "whether the kernel does the routing, which kernel it is, and its weights",
    ),
    Attributes(f"{LAYERS}.modular_kernel:FusedMoEKernel", ("fused_experts",), "which kernel it is"),
    Attributes(
        "vllm.forward_context:ForwardContext",
        ("slot_mapping", "no_compile_layers"),
        "the KV cache slots, and their layers",
        without=_MORE_WORK,
    ),
    Attributes(
        "vllm.config:VllmConfig",
        ("attention_config",),
        "determine whether every token has a slot",
        without=_MORE_WORK,
    ),
    Attributes(
        "vllm.config:CacheConfig",
        ("kv_sharing_fast_prefill",),
        "with it, a layer does not see all rows of the batch",
        without=_MORE_WORK,
    ),
    Attributes(
        "vllm.config:ParallelConfig",
        ("decode_context_parallel_size",),
        "with more than one rank, a token has a slot on only one of them",
        without=_MORE_WORK,
    ),
    Attributes(
        "vllm.config:AttentionConfig",
        ("hisparse_config",),
        "with it, tokens whose keys are on the host have no slot",
        versions=">=0.32",
        without=_MORE_WORK,
    ),
    Attributes(
        "vllm.model_executor.layers.attention:Attention",
        ("attn_type",),
        "the output of an encoder has no slots",
        without=_MORE_WORK,
    ),
)
# Methods of both kinds of engine that leave weights alone.
_ENGINES_ALIKE = (
    "add_request",
    "collective_rpc",
    "do_log_stats",
    "from_engine_args",
    "from_vllm_config",
    "get_num_unfinished_requests",
    "get_supported_tasks",
    "get_tokenizer",
    "get_weight_version",
    "is_sleeping",
    "list_loras",
    "pin_lora",
    "release_kv_cache_memory",
    "remove_lora",
    "reset_encoder_cache",
    "reset_mm_cache",
    "reset_prefix_cache",
    "start_profile",
    "stop_profile",
    "wake_up",
)
# Requests to a running engine. sleep is refused above level 0, discard if it names weights.
ASYNC_OPERATIONS = Operations(
    "vllm.v1.engine.async_llm:AsyncLLM",
    refused=(
        Operation("sleep", KEEPS_MEMORY),
        Operation("add_lora", NO_LORA),
        Operation("scale_elastic_ep", NO_SCALING),
    ),
    # The others that concern weights call worker methods through collective_rpc.
    accepted=(
        *_ENGINES_ALIKE,
        "abort",
        "check_admission",
        "check_health",
        "checkpoint_prepare",
        "checkpoint_restore",
        "compute_weight_checksums",
        "encode",
        "finish_weight_update",
        "generate",
        "get_external_elastic_ep_status",
        "get_kv_event_sources",
        "get_num_queued_tokens",
        "get_status",
        "handle_fault",
        "init_weight_transfer_engine",
        "is_paused",
        "is_tracing_enabled",
        "notify_kv_transfer_request_rejected",
        "pause_generation",
        "resume_generation",
        "shutdown",
        "shutdown_weight_transfer_engine",
        "start_draft_weight_update",
        "start_weight_update",
        "update_weight_version",
        "update_weights",
        "wait_for_requests_to_drain",
    ),
)
ENGINE_OPERATIONS = Operations(
    "vllm.v1.engine.llm_engine:LLMEngine",
    refused=(Operation("sleep", KEEPS_MEMORY), Operation("add_lora", NO_LORA)),
    accepted=(
        *_ENGINES_ALIKE,
        "abort_request",
        "apply_model",
        "do_log_stats_with_interval",
        "get_metrics",
        "has_unfinished_requests",
        "has_unfinished_requests_dp",
        "set_weight_version",
        "step",
    ),
)
WORKER_OPERATIONS = Operations(
    "vllm.v1.worker.gpu_worker:Worker",
    refused=(
        Operation("load_model", KEEPS_WEIGHTS),
        Operation("reload_weights", KEEPS_WEIGHTS),
        Operation("update_config", KEEPS_WEIGHTS),  # the configuration of weight loading
        Operation("init_weight_transfer_engine", KEEPS_WEIGHTS),
        Operation("start_weight_update", KEEPS_WEIGHTS),
        Operation("start_draft_weight_update", KEEPS_WEIGHTS),
        Operation("update_weights", KEEPS_WEIGHTS),
        Operation("finish_weight_update", KEEPS_WEIGHTS),
        Operation("reset_weights", KEEPS_WEIGHTS, versions=">=0.32"),
        Operation("sleep", KEEPS_MEMORY),
        Operation("wake_up", KEEPS_MEMORY),
        Operation("discard", KEEPS_MEMORY, versions=">=0.32"),
        Operation("checkpoint_prepare", KEEPS_MEMORY, versions=">=0.32"),
        Operation("checkpoint_restore", KEEPS_MEMORY, versions=">=0.32"),
        Operation("add_lora", NO_LORA),
        Operation("elastic_ep_execute", NO_SCALING),
        Operation("save_sharded_state", HOLDS_A_PART),
        Operation("save_tensorized_model", HOLDS_A_PART),
    ),
    accepted=(
        "annotate_profile",
        "apply_model",
        "check_health",
        "compile_or_warm_up_model",
        "compute_weight_checksums",
        "determine_available_memory",
        "execute_dummy_batch",
        "execute_model",
        "get_cache_block_size_bytes",
        "get_compilation_match_table",
        "get_draft_model",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model",
        "get_model_inspection",
        "get_simple_cpu_offload_num_cpu_blocks",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "handle_ft_command",
        "init_device",
        "initialize_from_config",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "sample_tokens",
        "set_kv_cache_layout",
        "shutdown",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "take_draft_token_ids",
        "update_max_model_len",
        "wait_for_comm",
    ),
)
# Requests cannot reach these, but functions that programs run in a worker can.
RUNNER_OPERATIONS = (Operation("reload_weights", KEEPS_WEIGHTS),)
MODEL_OPERATIONS = (Operation("load_weights", KEEPS_WEIGHTS),)


CONTRACT = Contract(
    engine="vLLM",
    package="vllm",
    supported=">=0.26,<0.34",
    tested={"0.26.0": "on a GPU", "0.32.0": "on the CPU"},
    names=NAMES,
    attributes=ATTRIBUTES,
    refusals=REFUSED,
    arguments=(EXPERT_ARGUMENTS, EXPERT_CONFIG, EXPERT_RANKS),
    operations=(ASYNC_OPERATIONS, ENGINE_OPERATIONS, WORKER_OPERATIONS),
)
