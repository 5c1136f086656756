"""The settings of vLLM that kt options do not go with. A part of the contract, see `contract`."""

from ..common import LOAD_FORMATS, NO_EXCHANGE, NO_LORA_OPTION, ONE_BY_ONE, SINGLE_RANK
from ..contract import Refusal

_TOGETHER = "not supported with kt options yet"
_PLACES = "both settings decide where weights are kept"

# Checked on the finished configuration.
REFUSED = (
    Refusal(
        "device_config.device_type",
        ("cuda", "cpu"),
        "kt-moe supports CUDA devices and CPUs",
        "vLLM's device",
    ),
    Refusal("parallel_config.pipeline_parallel_size", (1,), SINGLE_RANK),
    Refusal("parallel_config.data_parallel_size", (1,), SINGLE_RANK),
    Refusal("parallel_config.prefill_context_parallel_size", (1,), SINGLE_RANK),
    Refusal(
        "parallel_config.use_sequence_parallel_moe",
        (False,),
        _TOGETHER,
        "--enable-expert-parallel with --all2all-backend",
    ),
    Refusal("parallel_config.enable_elastic_ep", (False,), _TOGETHER),
    Refusal("parallel_config.enable_eplb", (False,), _TOGETHER),
    Refusal("parallel_config.enable_dbo", (False,), _TOGETHER),
    Refusal("parallel_config.ubatch_size", (0, 1), _TOGETHER),
    Refusal("lora_config", (None,), NO_LORA_OPTION, "--enable-lora"),
    Refusal("weight_transfer_config", (None,), NO_EXCHANGE),
    Refusal("model_config.enable_sleep_mode", (False,), NO_EXCHANGE),
    Refusal(
        "model_config.model_impl",
        ("auto", "vllm", "transformers"),
        "only vLLM's and transformers' model code is supported",
    ),
    Refusal("offload_config.uva.cpu_offload_gb", (0,), _PLACES),
    Refusal("offload_config.prefetch.offload_group_size", (0,), _PLACES),
    Refusal("offload_config.offload_backend", ("auto", "uva"), _PLACES),
    Refusal("load_config.load_format", LOAD_FORMATS, ONE_BY_ONE),
)
# Checked with more than one rank. With one, vLLM ignores the flag, which published commands have.
REFUSED_WITH_RANKS = (Refusal("parallel_config.enable_expert_parallel", (False,), _TOGETHER),)
# Checked with --speculative-config. `kt_kernel.serving.draft` places the experts of a draft model.
REFUSED_SPECULATION = (
    Refusal(
        "speculative_config.method",
        ("ngram", "eagle", "eagle3", "mtp"),
        "this method of speculative decoding is not supported with kt options",
        "--speculative-config",
    ),
)
# Checked with a draft model that has experts.
REFUSED_DRAFT = (
    Refusal(
        "speculative_config.draft_load_config.load_format",
        (None, *LOAD_FORMATS),  # None: that of the served model
        ONE_BY_ONE,
        "--speculative-config draft_load_config.load_format",
    ),
)
