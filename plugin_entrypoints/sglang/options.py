"""SGLang plugin: where the options and SGLang's own arguments come from.

The options come from the --kt-* flags or from the arguments of ``Engine(...)``, where a value equal
to SGLang's default counts as not given. If there are none, they come from the environment variable
KT_CONFIG, where an empty object counts as given: all options have their defaults. They travel to
the workers in a private attribute of the server arguments.
"""

import inspect
import logging
from typing import Any

from kt_kernel.serving.option_table import OPTIONS
from kt_kernel.serving.options import KTOptions

from ..common import choose
from .contract import (
    CONTRACT,
    DECLARE_LATE,
    DECLARE_RESOLUTION,
    MODEL_CONFIG,
    RESOLVING_VIEW,
)

OPTIONS_KEY = "_kt_options"  # checked options as a mapping; absent: SGLang runs unchanged
_SOURCE = "kt"  # our name in SGLang's records of decisions

_logger = logging.getLogger("sglang.kt")


def options_of(server_args: Any) -> KTOptions | None:
    """The options of an engine, checked; None if there are none and SGLang should run unchanged.

    Raises OptionError for an invalid value.
    """
    if hasattr(server_args, OPTIONS_KEY):
        return KTOptions.from_mapping(getattr(server_args, OPTIONS_KEY))
    options = choose(_given_as_fields(server_args) or None, _logger)
    if options is not None:
        setattr(server_args, OPTIONS_KEY, options.to_mapping())
    return options


def _given_as_fields(server_args: Any) -> dict[str, Any]:
    """The kt options among the arguments of ``Engine(...)`` that differ from their defaults."""
    parameters = inspect.signature(type(server_args)).parameters
    return {
        option.name: getattr(server_args, option.dest)
        for option in OPTIONS
        if option.dest in parameters
        and getattr(server_args, option.dest) != parameters[option.dest].default
    }


def resolved(server_args: Any) -> Any:
    """The server arguments with SGLang's own choices filled in.

    Newer versions keep given and decided values apart; older ones overwrite the given values.
    """
    if not CONTRACT.holds(RESOLVING_VIEW.versions):
        return server_args
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(server_args)


def model_config_of(server_args: Any) -> Any:
    """SGLang's ModelConfig of the served model."""
    if not CONTRACT.holds(MODEL_CONFIG.versions):
        return server_args.get_model_config()
    from sglang.srt.arg_groups import overrides

    return overrides.model_config_of(server_args)


def text_config(server_args: Any) -> Any:
    """The Hugging Face configuration of the language model."""
    return model_config_of(server_args).hf_text_config


def decide(server_args: Any, **fields: Any) -> None:
    """Sets values of SGLang's arguments, in the way in which each version records its own."""
    from sglang.srt.arg_groups import overrides
    from sglang.srt.runtime_context import get_context

    context = get_context()
    try:
        published = context.server_args is server_args
    except ValueError:  # none were published
        published = False
    if published:  # a process that does not run SGLang's checks and has already read the arguments
        context.override(_SOURCE, **fields)
    elif CONTRACT.holds(DECLARE_RESOLUTION.versions):
        overrides.declare_resolution(server_args, _SOURCE, **fields)
    elif CONTRACT.holds(DECLARE_LATE.versions):
        overrides.declare_late_resolution(server_args, _SOURCE, **fields)
    else:
        server_args.override(_SOURCE, **fields)
