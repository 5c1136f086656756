"""The contract with SGLang: everything that the plugin relies on. See ``../contract.py``.

This is the file to read, and to change, for a new release of SGLang.
"""

from ..common import (
    HOLDS_A_PART,
    KEEPS_MEMORY,
    KEEPS_WEIGHTS,
    LOAD_FORMATS,
    NO_EXCHANGE,
    NO_LORA,
    NO_LORA_OPTION,
    NO_SCALING,
    ONE_BY_ONE,
    SINGLE_RANK,
)
from ..contract import Attributes, Contract, Name, Operation, Operations, Refusal
from .expert_contract import (
    EXPERT_ARGUMENTS,
    EXPERT_CONFIG,
    FUSED_MOE,
    KT_WRAPPER,
    LOADING,
    ROUTES,
    ROUTING,
    SRT,
)
from .registry_contract import CALLS_WITH_ARGUMENTS, HOOK_SOURCE, HOOKING

_ARGUMENTS = f"{SRT}.server_args:ServerArgs"
_OVERRIDES = f"{SRT}.arg_groups.overrides"
_RUNNER = f"{SRT}.layers.moe.moe_runner"
_MODEL_RUNNER = f"{SRT}.model_executor"
_TOKENIZER = f"{SRT}.managers.tokenizer_manager:TokenizerManager"
_CONTROL = f"{SRT}.managers.tokenizer_control_mixin:TokenizerControlMixin"
_SCHEDULER = f"{SRT}.managers.scheduler:Scheduler"
_UPDATER = f"{SRT}.managers.scheduler_components.weight_updater:SchedulerWeightUpdaterManager"
_ENGINE = f"{SRT}.entrypoints.engine:Engine"
_MESSAGES = f"{SRT}.managers.io_struct"


# ---- requests to a running engine

_READS_A_PART = "the engine holds only the hot experts; read the checkpoint instead"
_SENDS_A_PART = "the engine holds only the hot experts; load the checkpoint there"

# Handled by the scheduler's weight updater, in methods of the same names.
_WEIGHTS = (
    Operation("update_weights_from_tensor", KEEPS_WEIGHTS),
    Operation("update_weights_from_distributed", KEEPS_WEIGHTS),
    Operation("update_weights_from_ipc", KEEPS_WEIGHTS),
    Operation("begin_weight_update", KEEPS_WEIGHTS, versions=">=0.5.21"),
    Operation("end_weight_update", KEEPS_WEIGHTS, versions=">=0.5.21"),
    Operation("init_weights_update_group", KEEPS_WEIGHTS),
    Operation("destroy_weights_update_group", KEEPS_WEIGHTS),
    Operation("release_memory_occupation", KEEPS_MEMORY),
    Operation("resume_memory_occupation", KEEPS_MEMORY),
    Operation("check_weights", _READS_A_PART),
    Operation("get_weights_by_name", _READS_A_PART),  # for the experts' weights
)
# Handled by the scheduler itself, in methods of the same names.
_SCHEDULED = (
    Operation("load_lora_adapter", NO_LORA),
    Operation("load_lora_adapter_from_tensors", NO_LORA),
    Operation("unload_lora_adapter", NO_LORA),
    Operation("init_weights_send_group_for_remote_instance", _SENDS_A_PART),
    Operation("send_weights_to_remote_instance", _SENDS_A_PART),
)
_FROM_DISK = Operation("update_weights_from_disk", KEEPS_WEIGHTS)

# The methods at which requests enter, in the process that the user started.
CONTROL_OPERATIONS = Operations(
    _CONTROL,
    refused=(*_WEIGHTS, *_SCHEDULED),
    accepted=(
        "add_external_corpus",
        "attach_hicache_storage",
        "clear_hicache_storage",
        "close_session",
        "detach_hicache_storage",
        "dump_expert_distribution_record",
        "dumper_control",
        "flush_cache",
        "get_hicache_l3_cache_layout",
        "get_internal_state",
        "get_loads",
        "init_communicators",
        "list_external_corpora",
        "open_session",
        "pd_role_switch",
        "remove_external_corpus",
        "set_internal_state",
        "slow_down",
        "start_expert_distribution_record",
        "start_profile",
        "stop_expert_distribution_record",
        "stop_profile",
        "update_control_communicator_fan_out",
        "update_weight_version",  # the name of a version, which changes no weight
    ),
)
TOKENIZER_OPERATIONS = (_FROM_DISK, Operation("scale_elastic_ep", NO_SCALING))
ENGINE_OPERATIONS = (
    Operation("save_remote_model", HOLDS_A_PART),
    Operation("save_sharded_model", HOLDS_A_PART),
)
# The methods by which the scheduler handles them.
UPDATER_OPERATIONS = (*_WEIGHTS, _FROM_DISK)
SCHEDULER_OPERATIONS = (
    *_SCHEDULED,
    Operation("handle_scale_elastic_ep", NO_SCALING),
    *ENGINE_OPERATIONS,
)
# Both, by class.
ENTRIES = {
    _CONTROL: CONTROL_OPERATIONS.refused,
    _TOKENIZER: TOKENIZER_OPERATIONS,
    _ENGINE: ENGINE_OPERATIONS,
}
HANDLERS = {_UPDATER: UPDATER_OPERATIONS, _SCHEDULER: SCHEDULER_OPERATIONS}


# ---- server arguments that are refused

_PLACES = "both settings decide where experts are kept"
_MOVES = "moving experts between ranks is not supported with kt options"
_BATCHES = "the CPU computes one batch at a time"
_NO_COMPILER = "kt-moe's kernels cannot be compiled by torch.compile"
_WHOLE = "kernels that read the weights of all experts are not supported"
_QUANTISES = "only the hot experts would be quantised"

# Checked as soon as the command line is parsed: a server with --encoder-only checks nothing later.
BEFORE_LAUNCH = (
    Refusal("encoder_only", (False,), "a server without a language model has no experts"),
    Refusal("use_ray", (False,), "Ray's workers do not load plugins"),
)
# Checked on the resolved server arguments.
REFUSED = (
    *BEFORE_LAUNCH,
    Refusal("pp_size", (1,), SINGLE_RANK),
    # Before the sizes that SGLang derives from it.
    Refusal("enable_dp_attention", (False,), SINGLE_RANK),
    Refusal("dp_size", (1,), SINGLE_RANK),
    Refusal("ep_size", (1,), SINGLE_RANK),
    Refusal("attn_dp_size", (1, None), SINGLE_RANK, versions=">=0.5.22"),
    # With context parallelism, a layer does not see all rows of the batch.
    Refusal("attn_cp_size", (1, None), SINGLE_RANK),
    Refusal("dcp_size", (1, None), SINGLE_RANK),
    Refusal("enable_prefill_cp", (False,), SINGLE_RANK),
    Refusal("enable_prefill_context_parallel", (False,), SINGLE_RANK, versions="<0.5.20"),
    Refusal("enable_dsa_prefill_context_parallel", (False,), SINGLE_RANK, versions="<0.5.20"),
    Refusal("enable_layernorm_sp", (False,), SINGLE_RANK, versions=">=0.5.19"),
    Refusal("moe_dp_size", (1,), SINGLE_RANK),
    Refusal("dwdp_size", (1,), _MOVES),
    Refusal(
        "moe_a2a_backend",
        ("none", None),
        "expert-parallel dispatch does not support CPU experts",
    ),
    Refusal("enable_w4a4_mxfp4_megamoe", (False,), _WHOLE, versions=">=0.5.19"),
    Refusal("enable_eplb", (False,), _MOVES),
    Refusal("ep_num_redundant_experts", (0,), _MOVES),
    Refusal("init_expert_location", ("trivial",), "experts must be in the model's own order"),
    Refusal("elastic_ep_backend", (None, "none"), _MOVES),
    Refusal("ep_join_mode", (None,), _MOVES, "the argument ep_join_mode"),
    Refusal("enable_elastic_expert_backup", (False,), _MOVES),
    Refusal("enable_paged_experts", (False,), _PLACES, versions=">=0.5.23"),
    Refusal("cpu_offload_gb", (0,), _PLACES),
    Refusal("offload_group_size", (-1, 0), _PLACES),
    Refusal("enable_lora", (None, False), NO_LORA_OPTION),
    Refusal("lora_paths", (None, [], {}), NO_LORA_OPTION),
    Refusal("uno_lora_path", (None,), NO_LORA_OPTION, versions=">=0.5.20"),
    Refusal(
        "speculative_algorithm",
        (None, "NGRAM", "EAGLE", "EAGLE3", "NEXTN"),
        "this kind of speculative decoding is not supported with kt options",
    ),
    Refusal("dllm_algorithm", (None,), "diffusion decoding is not supported with kt options"),
    Refusal(
        "moe_runner_backend",
        ("auto", "triton"),
        "the kernel of the hot experts must skip cold experts",
    ),
    Refusal(
        "model_impl",
        ("auto", "sglang", "transformers"),
        "only SGLang's and transformers' model code is supported",
    ),
    Refusal("enable_two_batch_overlap", (False,), _BATCHES),
    Refusal("enable_single_batch_overlap", (False,), _BATCHES),
    Refusal("enable_pdmux", (False,), _BATCHES),
    Refusal("enable_torch_compile", (False,), _NO_COMPILER),
    Refusal("enable_nvidia_megakernel", (False,), _WHOLE, versions=">=0.5.23"),
    Refusal("enable_amd_monokernel", (False,), _WHOLE, versions=">=0.5.23"),
    Refusal("device", ("cuda", "cpu"), "kt-moe supports CUDA devices and CPUs"),
    Refusal("load_format", LOAD_FORMATS, ONE_BY_ONE),
    Refusal("startup_weight_load_mode", ("serial",), ONE_BY_ONE, versions=">=0.5.18"),
    Refusal("weight_cache_mode", ("off",), "this cache does not support CPU experts"),
    Refusal("quantize_and_serve", (False,), _QUANTISES),
    Refusal("modelopt_quant", (None,), _QUANTISES),
    Refusal("torchao_config", ("", None), _QUANTISES, versions="<0.5.18"),
    Refusal(
        "rl_on_policy_target",
        (None,),
        "kt-moe has no training kernels that match its inference kernels",
    ),
    Refusal("custom_weight_loader", (None, []), NO_EXCHANGE),
    Refusal("checkpoint_engine_wait_weights_before_ready", (False,), NO_EXCHANGE),
    Refusal("enable_memory_saver", (False,), NO_EXCHANGE),
    Refusal("enable_weights_cpu_backup", (False,), NO_EXCHANGE),
    Refusal(
        "remote_instance_weight_loader_start_seed_via_transfer_engine",
        (False,),
        "other instances would get only the hot experts",
    ),
)
# Checked with --speculative-algorithm. A draft model's experts are those of
# `kt_kernel.serving.draft`.
REFUSED_SPECULATION = (
    Refusal(
        "enable_multi_layer_eagle",
        (False,),
        "draft models of several parts were not tested with kt options",
    ),
    Refusal(
        "speculative_moe_runner_backend",
        (None, "auto", "triton"),
        "the kernel of the hot experts must skip cold experts",
    ),
    Refusal(
        "speculative_moe_a2a_backend",
        ("none", None),
        "expert-parallel dispatch does not support CPU experts",
    ),
)
# Checked with a draft model that may have experts.
REFUSED_DRAFT = (Refusal("speculative_draft_load_format", (None, *LOAD_FORMATS), ONE_BY_ONE),)
# Checked if some experts are cold.
BESIDE_COLD = (
    Refusal(
        "enforce_shared_experts_fusion",
        (False,),
        "shared experts cannot be fused with routed experts if some are cold",
    ),
    Refusal(
        "enable_fused_moe_sum_all_reduce",
        (False,),
        "this kernel cannot skip the routes of cold experts",
    ),
)


# ---- names in SGLang's code

_ADDS_ARGUMENTS = "SGLang lets plugins add arguments"
_TELLS_PADDING = "a layer gets the padding rows"
_SCALES_TWICE = (
    "these models multiply the layer's output by routed_scaling_factor, two of them only on one of "
    "two code paths; a class that no layer has makes their check fail"
)
_TESTED_METHOD = "a tested method for hot experts; others are refused"
_REQUESTS = "refuses a request that the hybrid layer does not support"

RESOLVING_VIEW = Name(
    f"{_OVERRIDES}:resolving_view",
    "called",
    "server arguments with SGLang's own choices filled in; older versions change the arguments",
    versions=">=0.5.19",
)
MODEL_CONFIG = Name(
    f"{_OVERRIDES}:model_config_of",
    "called",
    "the served model's configuration and quantisation",
    versions=">=0.5.19",
)
DECLARE_RESOLUTION = Name(
    f"{_OVERRIDES}:declare_resolution",
    "called",
    "records decisions of the plugin among SGLang's own",
    versions=">=0.5.19",
    until="a layer of SGLang can refuse fused shared experts",
)
DECLARE_LATE = Name(
    f"{_OVERRIDES}:declare_late_resolution",
    "called",
    "the same in one version",
    versions=">=0.5.18,<0.5.20",
    until="this version is no longer supported",
)

NAMES = (
    # SGLang's plugins
    *HOOKING,
    # Arguments
    Name(
        f"{_ARGUMENTS}.add_cli_args",
        "wrapped",
        "adds the --kt-* flags that SGLang lacks; removes defaults of its own, to see which are "
        "given",
        until=_ADDS_ARGUMENTS,
    ),
    Name(
        f"{_ARGUMENTS}.from_cli_args",
        "wrapped",
        "checks the flags and keeps them in a private attribute for the workers",
        until=_ADDS_ARGUMENTS,
    ),
    Name(
        f"{_ARGUMENTS}.check_server_args",
        "wrapped",
        "refuses unsupported settings before a worker starts; installs the hooks",
        until=CALLS_WITH_ARGUMENTS,
    ),
    Name(f"{SRT}.runtime_context:get_server_args", "called", "where a worker finds the options"),
    Name(
        f"{SRT}.runtime_context:get_context",
        "called",
        "whether processes have already read arguments, and where",
        until=CALLS_WITH_ARGUMENTS,
    ),
    RESOLVING_VIEW,
    MODEL_CONFIG,
    Name(
        f"{_ARGUMENTS}.get_model_config", "called", "the same in older versions", versions="<0.5.19"
    ),
    DECLARE_RESOLUTION,
    DECLARE_LATE,
    Name(
        f"{_ARGUMENTS}.override",
        "called",
        "the same in the oldest version",
        versions="<0.5.18",
        until="the oldest version is one without it",
    ),
    # The layer
    Name(
        f"{SRT}.model_loader.loader:_initialize_model",
        "wrapped",
        "makes the layers of one model share one HybridModel, in their order",
        until="create_kt_config_from_server_args gets the model of a layer",
    ),
    Name(
        f"{SRT}.model_loader.loader:DefaultModelLoader._get_all_weights",
        "wrapped",
        "models do not get the weights of experts that kt-moe reads itself",
        until="SGLang asks layers which weights they need",
    ),
    Name(
        f"{KT_WRAPPER}:create_kt_config_from_server_args",
        "replaced",
        "SGLang's own needs --kt-weight-path and has no other source of options",
        until="SGLang's own supports kt options without a weight path",
    ),
    Name(
        f"{KT_WRAPPER}:KTEPWrapperMethod",
        "replaced",
        "SGLang's own passes no mask of experts, has no CPU path, reads weights a second time and "
        "multiplies by routed_scaling_factor twice on CUDA",
        until="SGLang's own accepts a HybridLayer",
    ),
    Name(
        f"{FUSED_MOE}:create_kt_config_from_server_args",
        "read",
        "the layer's own reference to the function, which the hook must have replaced",
    ),
    Name(
        f"{FUSED_MOE}:KTEPWrapperMethod",
        "read",
        "the layer's own reference to the class, which the hook must have replaced",
    ),
    Name(
        f"{FUSED_MOE}:FusedMoE.__init__",
        "wrapped",
        "refuses what a model requests of its experts and the CPU does not compute",
        until="MoeRunnerConfig holds everything that affects a layer's result",
    ),
    Name(
        f"{SRT}.models.transformers:TransformersFusedMoE.__init__",
        "wrapped",
        "numbers the experts of models in transformers' code as the model's layers",
        until="SGLang numbers them so",
    ),
    Name(
        f"{_RUNNER}.triton_utils.fused_moe:fused_experts",
        "called",
        "computes streamed experts, and hot ones in 4 or 8 bits",
    ),
    Name(
        f"{SRT}.layers.quantization.base_config:FusedMoEMethodBase.create_weights",
        "subclassed",
        "the method of hot experts in 4 or 8 bits",
    ),
    Name(f"{_RUNNER}:MoeRunnerConfig", "called", "its settings"),
    Name(f"{SRT}.layers.quantization.unquant:UnquantizedFusedMoEMethod", "read", _TESTED_METHOD),
    Name(f"{SRT}.layers.quantization.fp8:Fp8MoEMethod", "read", _TESTED_METHOD),
    Name(
        f"{SRT}.layers.moe.token_dispatcher:StandardCombineInput", "called", "what a layer returns"
    ),
    Name(
        f"{SRT}.utils.common:is_cpu",
        "called",
        "decides who multiplies by routed_scaling_factor, and which activations hot experts have",
    ),
    *(
        Name(
            f"{SRT}.models.{model}:KTEPWrapperMethod",
            "replaced",
            _SCALES_TWICE,
            until="models leave the factor to the layer",
        )
        for model in ("deepseek_v2", "glm4_moe", "glm4_moe_lite")
    ),
    # Padding
    Name(
        f"{_MODEL_RUNNER}.cuda_graph_buffer_registry:CudaGraphBufferRegistry.fill_from",
        "wrapped",
        "gets the number of tokens in a graph's batch, from which padding is known",
        until=_TELLS_PADDING,
        without="the CPU computes the padding rows of CUDA graphs like tokens",
    ),
    *(
        Name(
            f"{_MODEL_RUNNER}.runner.{module}:{runner}.capture",
            "wrapped",
            "its batches are dummies, for which the CPU should compute nothing",
            until=_TELLS_PADDING,
            without="the CPU computes the dummy batches of graph captures, which can take minutes",
        )
        for module, runner in (
            ("decode_cuda_graph_runner", "DecodeCudaGraphRunner"),
            ("prefill_cuda_graph_runner", "PrefillCudaGraphRunner"),
        )
    ),
    # Requests, except those of CONTROL_OPERATIONS
    *(
        Name(f"{owner}.{operation.name}", "wrapped", _REQUESTS, operation.versions)
        for owner, operations in (ENTRIES | HANDLERS).items()
        for operation in operations
        if owner != _CONTROL
    ),
    # kt model check
    *(
        Name(
            f"{_ENGINE}.{name}",
            "called",
            "serves small models of a class and reads their log-probabilities",
            without="kt model check does not work",
        )
        for name in ("generate", "shutdown")
    ),
    # Starts that fail
    Name(
        f"{_SCHEDULER}.__init__",
        "wrapped",
        "if our code fails in it, the user's process ends with that error",
        until="SGLang reports why a process of an engine has ended",
    ),
    Name(
        f"{SRT}.entrypoints.engine:_wait_for_scheduler_ready",
        "wrapped",
        "reports the error line of the worker that failed",
        until="SGLang reports why a process of an engine has ended",
    ),
)


# ---- attributes of SGLang's objects

ATTRIBUTES = (
    HOOK_SOURCE,
    Attributes(
        _ARGUMENTS,
        (
            "kt_weight_path",
            "kt_method",
            "kt_cpuinfer",
            "kt_threadpool_count",
            "kt_num_gpu_experts",
            "kt_max_deferred_experts_per_token",
        ),
        "options that SGLang knows: Engine accepts them by name",
    ),
    Attributes(
        _ARGUMENTS,
        (
            "model_path",
            "revision",
            "download_dir",
            "quantization",
            "disable_shared_experts_fusion",
            "moe_runner_backend",
            "enable_deterministic_inference",
            "cuda_graph_config",
            "chunked_prefill_size",
            "mem_fraction_static",
            "base_gpu_id",
            "speculative_num_draft_tokens",
            "speculative_draft_model_path",
            "speculative_draft_model_revision",
            "tp_size",
        ),
        "read from the resolved arguments",
    ),
    Attributes(
        f"{SRT}.model_executor.cuda_graph_config:CudaGraphConfig",
        ("decode", "prefill"),
        "how CUDA graphs are made",
    ),
    Attributes(
        f"{SRT}.model_executor.cuda_graph_config:PhaseConfig",
        ("backend", "bs", "max_bs"),
        "how CUDA graphs are made",
    ),
    Attributes(
        f"{SRT}.configs.model_config:ModelConfig",
        ("context_len", "hf_config", "hf_text_config", "is_draft_model", "quantization"),
        "the served model, and a draft model",
    ),
    Attributes(
        f"{SRT}.runtime_context:RuntimeContext",
        ("server_args", "override"),
        "arguments that processes have already read",
    ),
    Attributes(
        f"{FUSED_MOE}:FusedMoE",
        (
            "moe_runner_config",
            "num_fused_shared_experts",
            "moe_ep_size",
            "moe_tp_size",
            "moe_tp_rank",
            "top_k",
            "is_shared_fused_moe",
            "quant_method",
        ),
        "the layer",
    ),
    Attributes(
        f"{SRT}.layers.moe.moe_runner.base:MoeRunnerConfig",
        (
            "activation",
            "apply_router_weight_on_input",
            "gate_up_interleaved",
            "gemm1_alpha",
            "gemm1_clamp_limit",
            "inplace",
            "is_gated",
            "num_local_experts",
            "routed_scaling_factor",
            "swiglu_limit",
        ),
        "how the layer computes",
    ),
    Attributes(
        f"{SRT}.layers.moe.moe_runner.base:MoeRunnerConfig",
        ("gemm1_beta",),
        "how the layer computes",
        versions=">=0.5.18",
    ),
    Attributes(
        f"{SRT}.layers.moe.token_dispatcher.standard:StandardDispatchOutput",
        ("hidden_states", "hidden_states_scale", "topk_output"),
        "a layer's batch",
    ),
    Attributes(
        f"{SRT}.layers.moe.token_dispatcher.standard:StandardCombineInput",
        ("hidden_states",),
        "a layer's result",
    ),
    Attributes(_TOKENIZER, ("server_args",), "whether requests are refused"),
    Attributes(_ENGINE, ("server_args",), "whether requests are refused"),
    Attributes(f"{_MESSAGES}:GetWeightsByNameReqInput", ("name",), "which weights a request reads"),
)


CONTRACT = Contract(
    engine="SGLang",
    package="sglang",
    supported=">=0.5.17,<0.5.24",
    tested={"0.5.17": "on a GPU", "0.5.23": "on the CPU"},
    names=(*NAMES, *LOADING, *ROUTING),
    attributes=(*ATTRIBUTES, *ROUTES),
    refusals=REFUSED,
    arguments=(EXPERT_ARGUMENTS, EXPERT_CONFIG),
    operations=(CONTROL_OPERATIONS,),
)
