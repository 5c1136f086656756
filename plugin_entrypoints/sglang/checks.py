"""SGLang plugin: checks SGLang's arguments against the options, before anything is loaded."""

import logging
from functools import partial
from typing import Any

from kt_kernel.runtime.gpu import gpu_memory_from_outside
from kt_kernel.runtime.variant import kernel_kind
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.own_loading import loads_in_its_own_way
from kt_kernel.serving.tuned import Start

from ..common import refuse_class, refuse_streaming, warn_of_trace
from .contract import BESIDE_COLD, CONTRACT, REFUSED_DRAFT, REFUSED_SPECULATION
from .graphs import leave_long_prompts
from .options import OPTIONS_KEY, decide, model_config_of, options_of, resolved

_GRAPHS = ("full", "breakable", "disabled")  # ways to make CUDA graphs
_DENSE_LLAMA = (
    "model class Llama4ForCausalLM: SGLang loads it as a dense Llama, without its experts and with "
    "queries and keys in another order; serve the text-only model with "
    """--json-model-override-args '{"architectures": ["Llama4ForConditionalGeneration"]}'"""
)
# Model classes whose experts SGLang computes apart from their layers if there are several ranks.
_ONE_RANK = ("BeamForCausalLM",)
_CHECKED_KEY = "_kt_checked"  # the server arguments were checked against the options
# SGLang's record of what it decided, as (source, fields). Every supported version has it; if one
# did not, nothing would be changed.
_DECIDED = "_resolved_overrides"

_logger = logging.getLogger("sglang.kt")


def checked_options_of(server_args: Any) -> KTOptions | None:
    """`options_of`, with SGLang's other arguments checked against them, once.

    Raises OptionError, which names the value that is not supported.
    """
    options = options_of(server_args)
    if options is not None and not getattr(server_args, _CHECKED_KEY, False):
        _keep_triton(server_args)
        arguments, model_config = resolved(server_args), model_config_of(server_args)
        options = prepared(arguments, model_config, options)
        setattr(server_args, OPTIONS_KEY, options.to_mapping())
        cold = _some_are_cold(model_config, options)
        if cold or options.converts_hot:
            _separate_shared_experts(server_args, arguments)
        if cold:
            config = model_config.hf_text_config
            leave_long_prompts(server_args, arguments, config, options, _logger)
        setattr(server_args, _CHECKED_KEY, True)
        _logger.info(options.describe())
        warn_of_trace(arguments.device, _logger)
    return options


def prepared(arguments: Any, model_config: Any, options: KTOptions) -> KTOptions:
    """The options as the workers need them: see `kt_kernel.serving.preflight.prepare`.

    Raises OptionError, one line, if the engine's configuration is not supported.

    arguments: resolved server arguments; model_config: SGLang's ModelConfig.
    """
    from kt_kernel.serving.preflight import ServedModel, prepare

    classes = list(model_config.hf_config.architectures or [])
    if "Llama4ForCausalLM" in classes:
        raise OptionError(_DENSE_LLAMA)
    refuse_class(classes, options, CONTRACT.engine, _logger)
    if arguments.tp_size > 1 and {*classes} & {*_ONE_RANK}:
        raise OptionError(
            f"--tp-size {arguments.tp_size}: with several ranks, SGLang computes the experts of "
            f"{', '.join(classes)} apart from their layers; accepted: 1"
        )
    quantisation = model_config.quantization or arguments.quantization
    CONTRACT.refuse(arguments)
    if arguments.speculative_algorithm is not None:
        CONTRACT.refuse(arguments, REFUSED_SPECULATION)
        _refuse_draft(arguments)
    refuse_streaming(arguments.device, options)
    cold = _some_are_cold(model_config, options)
    if cold:
        CONTRACT.refuse(arguments, BESIDE_COLD)
        _refuse_dependence_on_the_batch(arguments, options)
    if cold or options.records:
        _refuse_compiled_graphs(arguments)
    served = ServedModel(
        arguments.model_path,
        quantisation,
        arguments.revision,
        arguments.download_dir,
        arguments.device,
        arguments.tp_size,
        model_config.dtype.itemsize,
        arguments.enable_deterministic_inference,
        _start(arguments, model_config),
        model_config.hf_config,
        own_loading=loads_in_its_own_way(CONTRACT.package, classes),
    )
    return prepare(options, model_config.hf_text_config, served, _logger)


def _refuse_draft(arguments: Any) -> None:
    """Raises OptionError if the experts of a draft model are not loaded from files."""
    try:
        CONTRACT.refuse(arguments, REFUSED_DRAFT)
    except OptionError:
        from kt_kernel.serving.draft import may_have_experts  # most starts do not need it

        # The draft's configuration is only read if it counts. Without a path, the draft is a part
        # of the served model.
        draft, revision = arguments.speculative_draft_model_path, arguments.revision
        if draft is not None:
            revision = arguments.speculative_draft_model_revision
        if arguments.speculative_algorithm != "NGRAM" and may_have_experts(
            draft or arguments.model_path, revision
        ):
            raise


def _start(arguments: Any, model_config: Any) -> Start:
    """What decides whether saved hot experts fit."""
    algorithm = arguments.speculative_algorithm
    return Start(
        "sglang",
        model_config.context_len,
        arguments.mem_fraction_static,
        "" if algorithm in (None, "NGRAM") else "--speculative-algorithm",
        partial(gpu_memory_from_outside, arguments.base_gpu_id),
    )


def _refuse_compiled_graphs(arguments: Any) -> None:
    if arguments.device == "cpu":
        return
    for phase in ("decode", "prefill"):
        backend = getattr(arguments.cuda_graph_config, phase).backend
        if backend not in _GRAPHS:
            raise OptionError(
                f"--cuda-graph-backend-{phase} {backend}: torch.compile cannot capture "
                f"kt-moe's kernels; accepted: {', '.join(_GRAPHS)}"
            )


def _refuse_dependence_on_the_batch(arguments: Any, options: KTOptions) -> None:
    """With --enable-deterministic-inference, results must not depend on the batch."""
    if not arguments.enable_deterministic_inference:
        return
    for flag, value, what in (
        (
            "--kt-max-deferred-experts-per-token",
            options.max_deferred_experts_per_token,
            "deferral depends",
        ),
        (
            "--kt-gpu-prefill-token-threshold",
            options.gpu_prefill_token_threshold,
            "which experts are streamed depends",
        ),
        (
            "--kt-enable-dynamic-expert-update",
            # `AUTO` is turned off later, because KT_KERNEL_KIND is set.
            options.enable_dynamic_expert_update == "on" and "on",
            "which experts are hot depends",
        ),
    ):
        if value:
            raise OptionError(
                f"{flag} {value}: {what} on the batch, which --enable-deterministic-inference "
                "forbids; remove one of them"
            )
    if kernel_kind() == 0:
        raise OptionError(
            "--enable-deterministic-inference: results of cold experts depend on the batch size in "
            "their last bits; set KT_KERNEL_KIND=vector, or remove the flag"
        )


def _some_are_cold(model_config: Any, options: KTOptions) -> bool:
    from kt_kernel.serving.placement import plan_placement

    return not plan_placement(options, model_config.hf_text_config).all_hot


def _keep_triton(server_args: Any) -> None:
    """Selects SGLang's Triton kernels where SGLang selected others without being asked.

    SGLang does so for some models and GPUs: it selects "triton_kernel" for gpt-oss, for example.
    Such kernels route tokens themselves, or store weights in a layout of their own.
    """
    decided = getattr(server_args, _DECIDED, None) or ()
    if not any("moe_runner_backend" in fields for _, fields in decided):
        return
    chosen = resolved(server_args).moe_runner_backend
    if chosen in ("auto", "triton"):
        return
    decide(server_args, moe_runner_backend="triton")
    _logger.info(
        "kt: --moe-runner-backend triton is set automatically, in place of %s: hot experts need "
        "kernels that skip cold ones",
        chosen,
    )


def _separate_shared_experts(server_args: Any, arguments: Any) -> None:
    """Prevents SGLang from fusing a model's shared experts with the routed ones, as it does on
    GPUs.

    If they are separate, the device computes them while the CPU computes the cold experts. Tensors
    of hot experts that kt-moe fills have no place for them.
    """
    if arguments.disable_shared_experts_fusion:
        return
    decide(server_args, disable_shared_experts_fusion=True)
    _logger.info(
        "kt: --disable-shared-experts-fusion is set automatically: the device computes shared "
        "experts, in models that have them, apart from the routed ones"
    )
