"""SGLang plugin: options and checks. The layer itself is in sglang_layer.py.

SGLang calls `register` in every process, before it reads the command line, and applies the hooks
afterwards. The options come from the --kt-* flags, from the arguments of ``Engine(...)`` (there a
value equal to SGLang's default counts as not given), or, when there are none of those, from the
environment variable KT_CONFIG. They travel to the workers as a private attribute of the server
arguments. Without any of them SGLang runs as it is.
"""

import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from kt_kernel.options import (
    ENVIRONMENT_VARIABLE,
    OPTIONS,
    KTOptions,
    OptionError,
    add_arguments,
    collect,
    exit_with,
    from_environment,
    restore_defaults,
)

from . import patches

TESTED_MODELS = ("Qwen3MoeForCausalLM",)

# Server arguments that the hybrid layer does not work with: field, accepted values (the first one
# is assumed where a version lacks the field), reason. Checked on the resolved arguments.
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("tp_size", (1,), "kt-moe serves a single rank so far"),
    ("pp_size", (1,), "kt-moe serves a single rank so far"),
    ("dp_size", (1,), "kt-moe serves a single rank so far"),
    ("ep_size", (1,), "kt-moe serves a single rank so far"),
    ("attn_dp_size", (1, None), "kt-moe serves a single rank so far"),
    ("enable_dp_attention", (False,), "kt-moe serves a single rank so far"),
    ("moe_a2a_backend", ("none", None), "expert-parallel dispatch does not know CPU experts"),
    ("enable_eplb", (False,), "moving experts between ranks does not know CPU experts"),
    ("ep_num_redundant_experts", (0,), "redundant experts are not supported"),
    ("init_expert_location", ("trivial",), "experts must be in the model's own order"),
    ("elastic_ep_backend", (None, "none"), "expert parallelism is not supported"),
    ("enable_paged_experts", (False,), "both decide where experts are kept"),
    ("cpu_offload_gb", (0,), "both decide where experts are kept"),
    ("offload_group_size", (-1, 0), "both decide where experts are kept"),
    ("enable_lora", (None, False), "LoRA is not supported together with kt options yet"),
    ("lora_paths", (None, [], {}), "LoRA is not supported together with kt options yet"),
    ("speculative_algorithm", (None,), "speculative decoding is not supported with kt options"),
    ("dllm_algorithm", (None,), "diffusion decoding is not supported together with kt options"),
    ("quantization", (None,), "kt-moe takes BF16, FP16 and FP32 checkpoints so far"),
    ("moe_runner_backend", ("auto", "triton"), "the hot experts' kernel must skip the cold ones"),
    ("model_impl", ("auto", "sglang"), "only SGLang's own model code is supported"),
    ("enable_two_batch_overlap", (False,), "the CPU works on one batch at a time"),
    ("enable_pdmux", (False,), "the CPU works on one batch at a time"),
    ("enable_torch_compile", (False,), "our kernels are no torch operations"),
    ("device", ("cuda", "cpu"), "kt-moe runs beside CUDA devices, or on the CPU alone"),
)

_OPTIONS_KEY = "_kt_options"  # checked options as a mapping; None: SGLang runs as it is
_CHECKED_KEY = "_kt_checked"  # the server arguments were checked against the options
_COMMAND_LINE_KEY = "_kt_command_line"  # errors are told in one line, not as a traceback
_REPLACED_KEY = "kt_replaced_defaults"  # in the namespace: SGLang's defaults of the kt options

_logger = logging.getLogger("sglang.kt")
_registered = False
_problem = ""  # why the hybrid layer cannot be installed; stops a start with kt options


def register() -> None:
    """Registers the hooks of patches.py with SGLang, once per process."""
    global _registered, _problem
    if _registered:
        return
    _registered = True
    absent = patches.missing("sglang")
    layer_hooks: list[tuple[str, Callable, str]] = []
    if absent:
        _problem = f"this SGLang lacks {', '.join(absent)}, which the plugin needs"
    else:
        try:
            from . import sglang_layer

            layer_hooks = sglang_layer.hooks()
        except Exception as error:  # whatever it is, SGLang would only log it and serve without us
            _problem = f"the plugin's layer cannot be installed ({type(error).__name__}: {error})"
    if any(target.startswith("sglang.srt.server_args:") for target in absent):
        # Nowhere to take options from: stop if some were given in a way that can be seen from here.
        if ENVIRONMENT_VARIABLE in os.environ or any(a.startswith("--kt-") for a in sys.argv):
            raise exit_with(OptionError(_problem))
        _logger.warning("kt: %s; SGLang runs without it", _problem)
        return

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    arguments = "sglang.srt.server_args.ServerArgs"
    for target, hook, kind in (
        (f"{arguments}.add_cli_args", _after_add_cli_args, "AFTER"),
        (f"{arguments}.from_cli_args", _around_from_cli_args, "AROUND"),
        (f"{arguments}.check_server_args", _after_check_server_args, "AFTER"),
        *layer_hooks,
    ):
        HookRegistry.register(target, hook, HookType[kind])


def options_of(server_args: Any) -> KTOptions | None:
    """The options of an engine, checked; None when there are none and SGLang is to run as it is.

    Raises OptionError for a wrong value.
    """
    if not hasattr(server_args, _OPTIONS_KEY):
        options = _options_from(_given_as_fields(server_args))
        setattr(server_args, _OPTIONS_KEY, None if options is None else options.to_mapping())
    mapping = getattr(server_args, _OPTIONS_KEY)
    return None if mapping is None else KTOptions.from_mapping(mapping)


def checked_options_of(server_args: Any) -> KTOptions | None:
    """`options_of`, the engine's other arguments checked against them; OptionError names one."""
    options = options_of(server_args)
    if options is not None and not getattr(server_args, _CHECKED_KEY, False):
        if _problem:
            raise OptionError(f"{_problem}; start without kt options, or use a tested version")
        from . import sglang_layer

        sglang_layer.verify_hooks()
        refuse_unsupported(resolved(server_args), _hf_config(server_args), options)
        setattr(server_args, _CHECKED_KEY, True)
        _logger.info(options.describe())
    return options


def resolved(server_args: Any) -> Any:
    """The server arguments with SGLang's own choices filled in.

    Newer versions keep what was given apart from what was decided; older ones write over it.
    """
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        return server_args
    return resolving_view(server_args)


def refuse_unsupported(arguments: Any, hf_config: Any, options: KTOptions) -> None:
    """Raises OptionError, one line, for an engine configuration that the hybrid layer cannot serve.

    arguments: resolved server arguments; hf_config: the model's configuration.
    """
    classes = list(hf_config.architectures or [])
    if not options.allow_untested and not set(classes) <= set(TESTED_MODELS):
        raise OptionError(
            f"model class {', '.join(classes)}: not tested with kt-moe; tested: "
            f"{', '.join(TESTED_MODELS)}; --kt-allow-untested serves it all the same"
        )
    if getattr(hf_config, "quantization_config", None):
        raise OptionError(
            "quantised checkpoint: kt-moe takes BF16, FP16 and FP32 checkpoints so far"
        )
    for field, accepted, reason in _REFUSED:
        value = getattr(arguments, field, accepted[0])
        if value not in accepted:
            flag = "--" + field.replace("_", "-")
            choices = [str(choice) for choice in accepted if type(choice) in (int, str)]
            raise OptionError(
                f"{flag if value is True else f'{flag} {value}'}: {reason}; "
                + (f"accepted: {', '.join(choices)}" if choices else "remove it")
            )
    experts = next(
        (
            count
            for name in ("num_experts", "n_routed_experts", "num_local_experts")
            if (count := getattr(hf_config, name, None))
        ),
        None,
    )
    if experts is not None:
        options.hot_count(experts)
    if arguments.device != "cpu" and (options.num_gpu_experts or 0) != experts:
        graphs = arguments.cuda_graph_config
        for phase in ("decode", "prefill"):
            backend = getattr(graphs, phase).backend
            if backend != "disabled":
                raise OptionError(
                    f"--cuda-graph-backend-{phase} {backend}: CUDA graphs are not supported "
                    "together with cold experts yet; add --cuda-graph-backend-decode disabled "
                    "--cuda-graph-backend-prefill disabled"
                )


def _after_add_cli_args(result: Any, parser: Any) -> Any:
    parser.set_defaults(**{_REPLACED_KEY: add_arguments(parser)})
    return result


def _around_from_cli_args(original: Callable, cls: Any, args: Any) -> Any:
    if not hasattr(args, _REPLACED_KEY):  # a namespace that no parser of ours made
        return original(cls, args)
    try:
        options = _options_from(collect(args))
    except OptionError as error:
        raise exit_with(error) from None
    restore_defaults(args, getattr(args, _REPLACED_KEY))
    server_args = original(cls, args)
    setattr(server_args, _COMMAND_LINE_KEY, True)
    setattr(server_args, _OPTIONS_KEY, None if options is None else options.to_mapping())
    return server_args


def _after_check_server_args(result: Any, server_args: Any) -> Any:
    try:
        checked_options_of(server_args)
    except OptionError as error:
        if getattr(server_args, _COMMAND_LINE_KEY, False):
            raise exit_with(error) from None
        raise
    return result


def _options_from(given: dict[str, Any]) -> KTOptions | None:
    given = given or from_environment()
    return KTOptions.from_mapping(given) if given else None


def _given_as_fields(server_args: Any) -> dict[str, Any]:
    """The kt options among the arguments of ``Engine(...)``: those unlike their defaults."""
    parameters = inspect.signature(type(server_args)).parameters
    return {
        option.name: getattr(server_args, option.dest)
        for option in OPTIONS
        if option.dest in parameters
        and getattr(server_args, option.dest) != parameters[option.dest].default
    }


def _hf_config(server_args: Any) -> Any:
    try:
        from sglang.srt.arg_groups.overrides import model_config_of
    except ImportError:
        return server_args.get_model_config().hf_config
    return model_config_of(server_args).hf_config
