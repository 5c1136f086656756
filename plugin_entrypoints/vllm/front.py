"""vLLM plugin: changes in the process that receives requests, if an engine has kt options.

The first such engine of a process installs the hooks. They pass calls of other engines on.
"""

import functools
from typing import Any

from .. import failure
from ..contract import Operations
from .contract import ASYNC_OPERATIONS, ENGINE_OPERATIONS
from .options import options_of
from .requests import guard_front

_installed = False
_command_line = False  # a failed start ends the process with one line


def install(command_line: bool) -> None:
    """Makes engines with kt options refuse requests, and report a failed start in one line.

    command_line: the process is a vLLM command; otherwise it is a Python program, which gets an
    exception.
    """
    global _installed, _command_line
    _command_line = command_line
    if _installed:
        return
    from vllm.v1.engine import utils
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    _hook_engine(AsyncLLM, ASYNC_OPERATIONS)
    _hook_engine(LLMEngine, ENGINE_OPERATIONS)
    _hook_startup(utils)
    _installed = True


def _hook_engine(engine: Any, operations: Operations) -> None:
    start = engine.__init__

    @functools.wraps(start)
    def start_with_kt(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        if options_of(self.vllm_config) is not None:
            # A client of an engine started by another process cannot know.
            if kwargs.get("client_addresses") is None:
                _require_plugin(self)
                failure.started()
            guard_front(self, operations)

    engine.__init__ = start_with_kt


def _require_plugin(engine: Any) -> None:
    """Ends the start if vLLM's workers serve the model without our layers. If a plugin cannot be
    loaded, vLLM only logs it."""
    parallel = engine.vllm_config.parallel_config
    local = parallel.distributed_executor_backend in ("mp", "uni") and parallel.nnodes == 1
    if local and 0 <= failure.confirmed() < parallel.world_size:
        engine.engine_core.shutdown()
        failure.stop("vLLM's workers did not load the kt-moe plugin; see their log", _command_line)


def _hook_startup(utils: Any) -> None:
    wait = utils.wait_for_engine_startup

    @functools.wraps(wait)
    def wait_with_kt(*args: Any, **kwargs: Any) -> Any:
        try:
            return wait(*args, **kwargs)
        except Exception:  # vLLM only reports that a process has ended
            failure.repeat(_command_line)
            raise

    utils.wait_for_engine_startup = wait_with_kt
