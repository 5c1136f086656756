"""SGLang plugin: refuses requests to a running engine that the hybrid layer does not support.

They would load, release or export weights, and SGLang does not have the weights of the cold
experts, which are packed on the CPU. Each is refused before anything is changed, where it enters:
in the TokenizerManager that serves both HTTP and ``Engine``. It fails in its usual way, and the
engine continues to serve. Servers that bypass the TokenizerManager send requests straight to the
scheduler, which refuses them, too.
"""

import inspect
import logging
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from sglang.srt.runtime_context import get_server_args

from ..common import RequestRefused
from ..contract import Operation
from .contract import CONTRACT, ENTRIES, HANDLERS
from .hooks import Hook
from .options import options_of

# How a method reports failure where a request enters. Most return (success, message).
_RAISE = (
    "get_weights_by_name",
    "release_memory_occupation",
    "resume_memory_occupation",
    "save_remote_model",
    "save_sharded_model",
)
_RETURN_MORE = {"update_weights_from_disk": (0,), "check_weights": (None, None)}
_RETURN_OUTPUT = (
    "load_lora_adapter",
    "load_lora_adapter_from_tensors",
    "unload_lora_adapter",
    "scale_elastic_ep",
)
_EXPERTS = ".experts."  # in the name of every parameter of experts

_logger = logging.getLogger("sglang.kt")


@cache
def entry_hooks() -> tuple[Hook, ...]:
    """The hooks on the methods at which requests enter."""
    return _hooks(ENTRIES, _at_entry)


@cache
def handler_hooks() -> tuple[Hook, ...]:
    """The hooks on the methods by which the scheduler handles them."""
    return _hooks(HANDLERS, _at_handler)


def _hooks(
    operations: dict[str, tuple[Operation, ...]], hook: Callable[..., Any]
) -> tuple[Hook, ...]:
    return tuple(
        Hook(f"{owner}.{operation.name}", "AROUND", partial(hook, operation))
        for owner, refused in operations.items()
        for operation in refused
        if CONTRACT.holds(operation.versions)
    )


def _at_entry(
    operation: Operation, original: Callable[..., Any], owner: Any, *args: Any, **given: Any
) -> Any:
    """Around a method of a TokenizerManager or an Engine."""
    asked = next(iter((*args, *given.values())), None)
    if options_of(owner.server_args) is None or not _is_refused(operation, asked):
        return original(owner, *args, **given)
    name, message = operation.name, _message(operation)
    if name in _RAISE:
        raise RequestRefused(message)
    if name in _RETURN_OUTPUT:
        return _awaitable(_failed_output(asked, message))
    return _awaitable((False, message, *_RETURN_MORE.get(name, ())))


def _at_handler(
    operation: Operation, original: Callable[..., Any], owner: Any, *args: Any, **given: Any
) -> Any:
    """Around a method of the scheduler, in which an error would end the engine."""
    asked = next(iter((*args, *given.values())), None)
    if options_of(get_server_args()) is None or not _is_refused(operation, asked):
        return original(owner, *args, **given)
    message = _message(operation)
    if operation.name.startswith("save_"):  # a remote call, whose answer is the error
        raise RequestRefused(message)
    return _failed_output(asked, message)


def _is_refused(operation: Operation, asked: Any) -> bool:
    return operation.name != "get_weights_by_name" or _EXPERTS in asked.name


def _message(operation: Operation) -> str:
    message = f"kt-moe does not support {operation.name}: {operation.reason}"
    _logger.warning("kt: refused a request: %s", message)
    return message


def _failed_output(asked: Any, message: str) -> Any:
    """SGLang's answer to a failed request, with the reason if it has a field for it."""
    kind = type(asked)
    output = getattr(sys.modules[kind.__module__], kind.__name__.replace("Input", "Output"))
    said = {"success": False, "message": message, "error_message": message, "parameter": None}
    return output(
        **{name: said[name] for name in inspect.signature(output).parameters if name in said}
    )


async def _awaitable(value: Any) -> Any:
    return value
