"""vLLM plugin: options and checks. The layer itself is in vllm_layer.py.

vLLM calls `register` in every process, before it reads the command line. The options travel in
``additional_config["kt"]``: from the --kt-* flags, from Python (``LLM(..., additional_config={"kt":
{...}})``), or from the environment variable KT_CONFIG. Without any of them vLLM runs as it is.
"""

import functools
import logging
import os
import sys
from typing import Any

from kt_kernel.options import (
    ENVIRONMENT_VARIABLE,
    KTOptions,
    OptionError,
    add_arguments,
    collect,
    exit_with,
    from_environment,
)

from . import patches

CONFIG_KEY = "kt"
TESTED_MODELS = ("Qwen3MoeForCausalLM",)

_logger = logging.getLogger("vllm.kt")
_registered = False
_problem = ""  # why the hybrid layer cannot be installed; stops a start with kt options


def register() -> None:
    """Installs the hooks of patches.py, once per process."""
    global _registered, _problem
    if _registered:
        return
    _registered = True
    absent = patches.missing("vllm")
    if absent:
        _problem = f"this vLLM lacks {', '.join(absent)}, which the plugin needs"
    else:
        try:
            from . import vllm_layer

            vllm_layer.install()
        except Exception as error:  # of any kind: vLLM must not serve as if we were not there
            _problem = f"the plugin's layer cannot be installed ({type(error).__name__}: {error})"
    if any(target.startswith("vllm.engine.arg_utils:EngineArgs.") for target in absent):
        # Nowhere to take options from: stop if some were given in a way that can be seen from here.
        if ENVIRONMENT_VARIABLE in os.environ or any(a.startswith("--kt-") for a in sys.argv):
            raise exit_with(OptionError(_problem))
        _logger.warning("kt: %s; vLLM runs without it", _problem)
        return
    _hook_arguments()


def options_of(vllm_config: Any) -> KTOptions | None:
    """The options of an engine, checked; None when there are none and vLLM is to run as it is."""
    additional = vllm_config.additional_config
    given = additional.get(CONFIG_KEY) if isinstance(additional, dict) else None
    return None if given is None else KTOptions.from_mapping(given)


def _hook_arguments() -> None:
    from vllm.engine.arg_utils import EngineArgs

    add_cli_args = EngineArgs.add_cli_args
    from_cli_args = EngineArgs.from_cli_args.__func__
    create_engine_config = EngineArgs.create_engine_config

    @functools.wraps(add_cli_args)
    def add_cli_args_with_kt(parser: Any) -> Any:
        parser = add_cli_args(parser)
        add_arguments(parser)
        return parser

    @functools.wraps(from_cli_args)
    def from_cli_args_with_kt(cls: Any, args: Any) -> Any:
        engine_args = from_cli_args(cls, args)
        engine_args.kt_command_line = True  # errors are told in one line, not as a traceback
        try:
            _merge(engine_args, collect(args))
        except OptionError as error:
            raise exit_with(error) from None
        return engine_args

    @functools.wraps(create_engine_config)
    def create_engine_config_with_kt(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            _take_environment(self)
            if options_of(self) is not None and _problem:
                raise OptionError(f"{_problem}; start without kt options, or use a tested version")
            config = create_engine_config(self, *args, **kwargs)
            options = options_of(config)
            if options is not None:
                refuse_unsupported(config, options)
                _logger.info(options.describe())
        except OptionError as error:
            if getattr(self, "kt_command_line", False):
                raise exit_with(error) from None
            raise
        return config

    EngineArgs.add_cli_args = staticmethod(add_cli_args_with_kt)
    EngineArgs.from_cli_args = classmethod(from_cli_args_with_kt)
    EngineArgs.create_engine_config = create_engine_config_with_kt


def _take_environment(engine_args: Any) -> None:
    """Takes the options in KT_CONFIG; where some were given another way, it only says so."""
    given = from_environment()
    if not given:
        return
    additional = engine_args.additional_config
    present = additional.get(CONFIG_KEY) if isinstance(additional, dict) else None
    if present is None:
        _merge(engine_args, given)
    elif KTOptions.from_mapping(present) != KTOptions.from_mapping(given):
        _logger.warning("kt: %s does not count beside the options given", ENVIRONMENT_VARIABLE)


def _merge(engine_args: Any, given: dict[str, Any]) -> None:
    """Puts given options, checked, into the engine arguments' additional_config."""
    if not given:
        return
    additional = engine_args.additional_config
    if not isinstance(additional, dict):
        raise OptionError(
            f"additional_config {type(additional).__name__}: kt options need a dict there"
        )
    present = additional.get(CONFIG_KEY)
    if present is not None:
        raise OptionError(
            "kt options: given as flags and in additional_config; give them in one place"
        )
    # A copy: additional_config's default is shared between instances.
    options = KTOptions.from_mapping(given)
    engine_args.additional_config = {**additional, CONFIG_KEY: options.to_mapping()}


def refuse_unsupported(config: Any, options: KTOptions) -> None:
    """Raises OptionError, one line, for an engine configuration that we cannot serve."""
    model, parallel = config.model_config, config.parallel_config
    classes = list(model.architectures or [])
    if not options.allow_untested and not set(classes) <= set(TESTED_MODELS):
        raise OptionError(
            f"model class {', '.join(classes)}: not tested with kt-moe; tested: "
            f"{', '.join(TESTED_MODELS)}; --kt-allow-untested serves it all the same"
        )
    experts = model.get_num_experts()
    if not experts:
        raise OptionError(
            f"model class {', '.join(classes)}: it has no experts; remove the kt options"
        )
    options.hot_count(experts)
    options.check_weight_path()
    for name in (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "prefill_context_parallel_size",
    ):
        value = getattr(parallel, name, 1)
        if value != 1:
            raise OptionError(
                f"--{name.replace('_', '-')} {value}: kt-moe serves a single rank so far; "
                "accepted: 1"
            )
    for flag, on in (
        ("--enable-expert-parallel", parallel.enable_expert_parallel),
        ("--enable-eplb", parallel.enable_eplb),
        ("--enable-dbo", getattr(parallel, "enable_dbo", False)),
        ("--enable-lora", config.lora_config is not None),
        ("--speculative-config", config.speculative_config is not None),
    ):
        if on:
            raise OptionError(
                f"{flag}: not supported together with kt options yet; remove one of them"
            )
    if model.quantization is not None:
        raise OptionError(
            f"quantization {model.quantization}: kt-moe takes BF16, FP16 and FP32 "
            "checkpoints so far"
        )
    if config.device_config.device_type != "cpu" and not model.enforce_eager:
        raise OptionError(
            "CUDA graphs: not supported together with kt options yet; add --enforce-eager"
        )
