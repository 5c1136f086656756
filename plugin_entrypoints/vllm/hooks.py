"""vLLM plugin: registers with vLLM. The entry point is `register`.

vLLM calls it in every process, before it reads the command line. The hooks installed then look for
kt options and pass every call on. The first engine with kt options installs the rest.
"""

import functools
from collections.abc import Callable
from typing import Any

from kt_kernel.serving.flags import add_arguments, collect, exit_with
from kt_kernel.serving.option_table import OptionError

from .. import failure
from ..common import install, warn_of_trace
from .contract import CONTRACT
from .options import CONFIG_KEY, logger, merge, options_of, prepared, take_environment

_registered = False
_problem = ""  # why the hybrid layer cannot be installed; ends a start with kt options


def register() -> None:
    """Installs the hooks that look for options, once per process."""
    global _registered, _problem
    if _registered:
        return
    _registered = True
    _problem = install(CONTRACT.engine, _install, logger)


def _install() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.worker_base import WorkerBase

    _hook_arguments(EngineArgs)
    _hook_processes(Executor, WorkerBase)


def _hook_arguments(engine_args: Any) -> None:
    add_cli_args = engine_args.add_cli_args
    from_cli_args = engine_args.from_cli_args.__func__
    create_engine_config = engine_args.create_engine_config

    @functools.wraps(add_cli_args)
    def add_cli_args_with_kt(parser: Any) -> Any:
        parser = add_cli_args(parser)
        add_arguments(parser, negated=True)
        return parser

    @functools.wraps(from_cli_args)
    def from_cli_args_with_kt(cls: Any, args: Any) -> Any:
        made = from_cli_args(cls, args)
        made.kt_command_line = True  # report errors in one line instead of a traceback
        try:
            merge(made, collect(args) or None)
        except OptionError as error:
            raise exit_with(error) from None
        return made

    @functools.wraps(create_engine_config)
    def create_engine_config_with_kt(self: Any, *args: Any, **kwargs: Any) -> Any:
        def create() -> Any:
            return create_engine_config(self, *args, **kwargs)

        command_line = getattr(self, "kt_command_line", False)
        try:
            take_environment(self)
            if options_of(self) is None:
                return create()
            return _prepared(create, command_line)
        except OptionError as error:
            if command_line:
                raise exit_with(error) from None
            raise

    engine_args.add_cli_args = staticmethod(add_cli_args_with_kt)
    engine_args.from_cli_args = classmethod(from_cli_args_with_kt)
    engine_args.create_engine_config = create_engine_config_with_kt


def _prepared(create: Callable[[], Any], command_line: bool) -> Any:
    """Returns the checked configuration of an engine with kt options, and prepares this process for
    the engine. Raises OptionError if it cannot be served."""
    if _problem:
        raise OptionError(_problem)
    CONTRACT.check(logger)
    config = create()
    options = options_of(config)
    assert options is not None
    options = prepared(config, options)
    config.additional_config = {**config.additional_config, CONFIG_KEY: options.to_mapping()}

    from . import front, slot

    slot.refuse_taken()
    front.install(command_line)
    failure.listen()
    logger.info(options.describe())
    warn_of_trace(config.device_config.device_type, logger)
    return config


def _hook_processes(executor: Any, worker: Any) -> None:
    """Hooks the points at which executors and workers get the configuration."""
    start_workers = executor.__init__
    start_worker = worker.__init__

    @functools.wraps(start_workers)
    def start_workers_with_kt(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if options_of(vllm_config) is None:
            return start_workers(self, vllm_config, *args, **kwargs)
        try:
            start_workers(self, vllm_config, *args, **kwargs)
        except failure.StartError:
            raise
        except Exception:  # vLLM only reports that a worker has ended
            failure.repeat()
            raise

    @functools.wraps(start_worker)
    def start_worker_with_kt(self: Any, *args: Any, **kwargs: Any) -> None:
        start_worker(self, *args, **kwargs)
        if options_of(self.vllm_config) is not None:
            from .worker import prepare

            prepare(self)

    executor.__init__ = start_workers_with_kt
    worker.__init__ = start_worker_with_kt
