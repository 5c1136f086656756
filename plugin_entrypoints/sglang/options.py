"""SGLang plugin: options and checks. The layer itself is in layer.py.

SGLang calls `register` in every process, before it reads the command line, and applies the hooks
afterwards. The options come from the --kt-* flags, from the arguments of ``Engine(...)`` (there a
value equal to SGLang's default counts as not given), or, when there are none of those, from the
environment variable KT_CONFIG (there an empty object counts: all options have their defaults).
They travel to the workers as a private attribute of the server arguments. Without any of them
SGLang runs as it is.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any

from kt_kernel.options import (
    OPTIONS,
    KTOptions,
    OptionError,
    add_arguments,
    collect,
    exit_with,
    restore_defaults,
)

from ..common import (
    choose,
    install,
    quantisation_of,
    refuse_class,
    refuse_quantised,
    warn_of_trace,
)
from .contract import BESIDE_COLD, CONTRACT

_NO_COMPILER = "our kernels are no torch operations"
_GRAPHS = ("full", "breakable", "disabled")  # how CUDA graphs are made
_SOURCE = "kt"  # who decided, in SGLang's records of decisions
_OPTIONS_KEY = "_kt_options"  # checked options as a mapping; None: SGLang runs as it is
_CHECKED_KEY = "_kt_checked"  # the server arguments were checked against the options
_COMMAND_LINE_KEY = "_kt_command_line"  # errors are told in one line, not as a traceback
_REPLACED_KEY = "kt_replaced_defaults"  # in the namespace: SGLang's defaults of the kt options

_logger = logging.getLogger("sglang.kt")
_registered = False
_problem = ""  # why the hybrid layer cannot be installed; stops a start with kt options


def register() -> None:
    """Registers the hooks of contract.py with SGLang, once per process."""
    global _registered, _problem
    if _registered:
        return
    _registered = True
    _problem = install("SGLang", _hook_arguments, _logger) or install(
        "SGLang", _hook_layer, _logger
    )


def _hook_arguments() -> None:
    arguments = "sglang.srt.server_args.ServerArgs"
    _register_hooks(
        [
            (f"{arguments}.add_cli_args", _after_add_cli_args, "AFTER"),
            (f"{arguments}.from_cli_args", _around_from_cli_args, "AROUND"),
            (f"{arguments}.check_server_args", _after_check_server_args, "AFTER"),
        ]
    )


def _hook_layer() -> None:
    from . import layer

    _register_hooks(layer.hooks())


def _register_hooks(hooks: list[tuple[str, Callable, str]]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook, kind in hooks:
        HookRegistry.register(target, hook, HookType[kind])


def options_of(server_args: Any) -> KTOptions | None:
    """The options of an engine, checked; None when there are none and SGLang is to run as it is.

    Raises OptionError for a wrong value.
    """
    if not hasattr(server_args, _OPTIONS_KEY):
        options = choose(_given_as_fields(server_args) or None, _logger)
        setattr(server_args, _OPTIONS_KEY, None if options is None else options.to_mapping())
    mapping = getattr(server_args, _OPTIONS_KEY)
    return None if mapping is None else KTOptions.from_mapping(mapping)


def checked_options_of(server_args: Any) -> KTOptions | None:
    """`options_of`, the engine's other arguments checked against them; OptionError names one."""
    options = options_of(server_args)
    if options is not None and not getattr(server_args, _CHECKED_KEY, False):
        if _problem:
            raise OptionError(_problem)
        CONTRACT.check(_logger)
        from . import layer

        layer.verify_hooks()
        arguments, hf_config = resolved(server_args), _hf_config(server_args)
        refuse_unsupported(arguments, hf_config, options)
        if _some_are_cold(hf_config, options):
            _separate_shared_experts(server_args, arguments)
        setattr(server_args, _CHECKED_KEY, True)
        _logger.info(options.describe())
        warn_of_trace(arguments.device, _logger)
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
    from kt_kernel.preflight import check_model

    refuse_class(list(hf_config.architectures or []), options)
    refuse_quantised(_quantisation(arguments, hf_config), options)
    CONTRACT.refuse(arguments)
    check_model(options, language_model(hf_config))
    if not _some_are_cold(hf_config, options):
        return
    CONTRACT.refuse(arguments, BESIDE_COLD)
    if arguments.device != "cpu":
        for phase in ("decode", "prefill"):
            backend = getattr(arguments.cuda_graph_config, phase).backend
            if backend not in _GRAPHS:
                raise OptionError(
                    f"--cuda-graph-backend-{phase} {backend}: {_NO_COMPILER}; accepted: "
                    f"{', '.join(_GRAPHS)}"
                )


def _some_are_cold(hf_config: Any, options: KTOptions) -> bool:
    from kt_kernel.preflight import num_experts

    experts = num_experts(language_model(hf_config))
    return options.hot_count(experts) < experts


def _separate_shared_experts(server_args: Any, arguments: Any) -> None:
    """Keeps SGLang from fusing a model's shared experts into the routed ones, as it does on GPUs:
    apart, the device computes them while the CPU is at the cold experts."""
    if getattr(arguments, "disable_shared_experts_fusion", False):
        return
    _decide(server_args, disable_shared_experts_fusion=True)
    _logger.info(
        "kt: --disable-shared-experts-fusion is set: shared experts, in models that have them, "
        "stay apart from the routed ones, and the device computes them beside the cold experts"
    )


def _decide(server_args: Any, **fields: Any) -> None:
    """Records values of SGLang's arguments that we decide, as this version records its own."""
    from sglang.srt.arg_groups import overrides
    from sglang.srt.runtime_context import get_context

    context = get_context()
    try:
        published = context.server_args is server_args
    except ValueError:  # none are
        published = False
    if published:  # a process without SGLang's own checks: what it read from them counts
        context.override(_SOURCE, **fields)
    elif hasattr(overrides, "declare_resolution"):
        overrides.declare_resolution(server_args, _SOURCE, **fields)
    else:
        server_args.override(_SOURCE, **fields)


def _quantisation(arguments: Any, hf_config: Any) -> str | None:
    """What the engine's arguments or the model's configuration say that it is quantised with."""
    settings = getattr(hf_config, "quantization_config", None)
    return quantisation_of(settings) or getattr(arguments, "quantization", None)


def _after_add_cli_args(result: Any, parser: Any) -> Any:
    parser.set_defaults(**{_REPLACED_KEY: add_arguments(parser)})
    return result


def _around_from_cli_args(original: Callable, cls: Any, args: Any) -> Any:
    if not hasattr(args, _REPLACED_KEY):  # a namespace that no parser of ours made
        return original(cls, args)
    try:
        options = choose(collect(args) or None, _logger)
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


def _given_as_fields(server_args: Any) -> dict[str, Any]:
    """The kt options among the arguments of ``Engine(...)``: those unlike their defaults."""
    parameters = inspect.signature(type(server_args)).parameters
    return {
        option.name: getattr(server_args, option.dest)
        for option in OPTIONS
        if option.dest in parameters
        and getattr(server_args, option.dest) != parameters[option.dest].default
    }


def text_config(server_args: Any) -> Any:
    """The configuration of the language model."""
    return language_model(_hf_config(server_args))


def language_model(hf_config: Any) -> Any:
    """The part of a model's configuration that describes its language model."""
    return getattr(hf_config, "text_config", None) or hf_config


def _hf_config(server_args: Any) -> Any:
    try:
        from sglang.srt.arg_groups.overrides import model_config_of
    except ImportError:
        return server_args.get_model_config().hf_config
    return model_config_of(server_args).hf_config
