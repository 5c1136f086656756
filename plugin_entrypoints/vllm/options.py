"""vLLM plugin: options and checks. The layer itself is in layer.py.

vLLM calls `register` in every process, before it reads the command line. The options travel in
``additional_config["kt"]``: from the --kt-* flags, from Python (``LLM(..., additional_config={"kt":
{...}})``), or from the environment variable KT_CONFIG. An empty mapping counts as given: all
options have their defaults. Without any of them vLLM runs as it is.
"""

import functools
import logging
from typing import Any

from kt_kernel.options import KTOptions, OptionError, add_arguments, collect, exit_with

from ..common import (
    choose,
    install,
    refuse_class,
    refuse_quantised,
    warn_of_trace,
)
from .contract import CONTRACT

CONFIG_KEY = "kt"

_logger = logging.getLogger("vllm.kt")
_registered = False
_problem = ""  # why the hybrid layer cannot be installed; stops a start with kt options


def register() -> None:
    """Installs the hooks of contract.py, once per process."""
    global _registered, _problem
    if _registered:
        return
    _registered = True
    _problem = install(
        CONTRACT, _install_layer, _hook_arguments, "vllm.engine.arg_utils:EngineArgs.", _logger
    )


def _install_layer() -> None:
    from . import layer

    layer.install()


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
            _merge(engine_args, collect(args) or None)
        except OptionError as error:
            raise exit_with(error) from None
        return engine_args

    @functools.wraps(create_engine_config)
    def create_engine_config_with_kt(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            _take_environment(self)
            if options_of(self) is not None and _problem:
                raise OptionError(_problem)
            config = create_engine_config(self, *args, **kwargs)
            options = options_of(config)
            if options is not None:
                refuse_unsupported(config, options)
                _logger.info(options.describe())
                warn_of_trace(config.device_config.device_type, _logger)
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
    additional = engine_args.additional_config
    present = additional.get(CONFIG_KEY) if isinstance(additional, dict) else None
    options = choose(present, _logger)
    if present is None and options is not None:
        _merge(engine_args, options.to_mapping())


def _merge(engine_args: Any, given: dict[str, Any] | None) -> None:
    """Puts given options, checked, into the engine arguments' additional_config."""
    if given is None:
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
    from kt_kernel.preflight import check_model

    model = config.model_config
    refuse_class(list(model.architectures or []), options)
    refuse_quantised(getattr(model, "quantization", None), options)
    CONTRACT.refuse(config)
    check_model(options, model.hf_text_config)
