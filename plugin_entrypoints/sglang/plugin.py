"""SGLang plugin: registers with SGLang, and hooks its arguments.

SGLang calls `register` in every process, before it reads the command line, and applies the hooks
afterwards. The hooks on its arguments are always registered: they add the --kt-* flags. All other
hooks are installed only if options were given, see hooks.py.
"""

import logging
import sys
from typing import Any

from kt_kernel.serving.flags import add_arguments, collect, exit_with, restore_defaults
from kt_kernel.serving.option_table import OptionError

from .. import failure
from ..common import choose, install
from . import hooks, startup, sweep
from .checks import checked_options_of
from .contract import BEFORE_LAUNCH, CONTRACT
from .hooks import Hook
from .options import OPTIONS_KEY, options_of

_COMMAND_LINE_KEY = "_kt_command_line"  # report errors in one line instead of a traceback
_REPLACED_KEY = "kt_replaced_defaults"  # in the namespace: SGLang's defaults of the kt options
_GIVEN_KEY = "kt_given"  # in the namespace: the options given on the command line

_logger = logging.getLogger("sglang.kt")
_registered = False
_problem = ""  # why the plugin cannot serve; ends a start with kt options
_arrived = False  # whether another process sent server arguments with kt options


class Travelling(dict[str, Any]):
    """Checked options, as a mapping, in server arguments that travel to other processes.

    A worker unpickles the server arguments before SGLang loads its plugins there. The plugin then
    knows that it must register all of its hooks.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (dict(self),)


def _arrive(options: dict[str, Any]) -> Travelling:
    global _arrived
    _arrived = True
    # Tokenizer workers load no plugins; they only receive requests.
    if "sglang.srt.managers.tokenizer_manager" in sys.modules:
        from . import requests

        hooks.apply(requests.entry_hooks())
    return Travelling(options)


def register() -> None:
    """Registers the hooks of contract.py with SGLang, once per process."""
    global _registered, _problem
    if _registered:
        return
    _registered = True
    _problem = install(CONTRACT.engine, _hook_arguments, _logger)
    if _arrived:
        try:
            _register_in_worker()
        except OptionError as error:  # SGLang would log it and serve without the plugin
            failure.end(error, CONTRACT.package)
            raise exit_with(error) from error


def _register_in_worker() -> None:
    if _problem:
        raise OptionError(_problem)
    try:
        hooks.register(_serving_hooks())
        sweep.once_when_applied()
    except Exception as error:
        raise OptionError(
            f"the plugin cannot be installed in a worker ({type(error).__name__}: {error})"
        ) from error


def _hook_arguments() -> None:
    for hook in _argument_hooks():
        if not hook.exists():  # SGLang would only log it
            raise LookupError(f"SGLang has no {hook.dotted}")
    hooks.register(_argument_hooks())


def _argument_hooks() -> list[Hook]:
    arguments = "sglang.srt.server_args:ServerArgs"
    return [
        Hook(f"{arguments}.add_cli_args", "AFTER", _after_add_cli_args),
        Hook(f"{arguments}.from_cli_args", "BEFORE", _before_from_cli_args),
        Hook(f"{arguments}.from_cli_args", "AFTER", _after_from_cli_args),
        Hook(f"{arguments}.check_server_args", "AFTER", _after_check_server_args),
    ]


def _serving_hooks() -> list[Hook]:
    """The hooks of an engine with kt options."""
    from . import layer, requests

    return [*layer.worker_hooks(), *requests.entry_hooks(), *startup.HOOKS]


def _after_add_cli_args(result: Any, parser: Any) -> Any:
    parser.set_defaults(**{_REPLACED_KEY: add_arguments(parser)})
    return result


def _before_from_cli_args(cls: Any, args: Any) -> None:
    """Takes the kt options out of the namespace, so that SGLang reads its own defaults."""
    if hasattr(args, _REPLACED_KEY):  # a namespace made by our parser
        setattr(args, _GIVEN_KEY, collect(args))
        restore_defaults(args, getattr(args, _REPLACED_KEY))


def _after_from_cli_args(server_args: Any, cls: Any, args: Any) -> Any:
    if not hasattr(args, _GIVEN_KEY):
        return server_args
    try:
        options = choose(getattr(args, _GIVEN_KEY) or None, _logger)
        if options is not None:
            hooks.verify(_argument_hooks())
            CONTRACT.refuse(server_args, BEFORE_LAUNCH)
    except OptionError as error:
        raise exit_with(error) from None
    if options is not None:
        setattr(server_args, OPTIONS_KEY, options.to_mapping())
        setattr(server_args, _COMMAND_LINE_KEY, True)
    return server_args


def _after_check_server_args(result: Any, server_args: Any) -> Any:
    """In the main process, before any other one starts."""
    try:
        options = options_of(server_args)
        if options is None:
            startup.forget()
            return result
        if _problem:
            raise OptionError(_problem)
        options = checked_options_of(server_args)
        assert options is not None
        CONTRACT.check(_logger)
        hooks.apply(_serving_hooks())
        setattr(server_args, OPTIONS_KEY, Travelling(options.to_mapping()))
        startup.listen(getattr(server_args, _COMMAND_LINE_KEY, False))
    except OptionError as error:
        if getattr(server_args, _COMMAND_LINE_KEY, False):
            raise exit_with(error) from None
        raise
    return result
