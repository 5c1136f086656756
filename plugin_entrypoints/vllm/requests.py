"""vLLM plugin: refuses requests to a running engine that the hybrid layer does not support.

They would change, move or write weights, and the plugin holds some of the weights. Each is refused
where it enters, before the engine has changed anything, so the engine continues to serve. This is
done in the process that receives requests, and again in the workers, which custom code can reach in
other ways.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from ..common import RequestRefused
from ..contract import Operation, Operations
from .contract import WORKER_OPERATIONS

Given = Callable[[], dict[str, Any]]  # the arguments of a call, by name, defaults included

# Operations that are refused with some arguments only.
_REFUSED_IF: dict[str, Callable[[dict[str, Any]], bool]] = {
    "sleep": lambda given: given.get("level", 1) != 0,  # level 0 only pauses
    "discard": lambda given: "weights" in given["tags"],
}


def guard(owner: Any, operations: Iterable[Operation]) -> None:
    """Makes one object of vLLM refuse the operations. Its class stays unchanged."""
    for operation in operations:
        method = getattr(owner, operation.name, None)
        if method is not None:
            setattr(owner, operation.name, _guarded(method, functools.partial(_refuse, operation)))


def guard_front(engine: Any, operations: Operations) -> None:
    """`guard` for an object that also calls worker methods by name."""
    guard(engine, operations.refused)
    parallel = engine.vllm_config.parallel_config
    # A worker may have custom methods.
    custom = bool(parallel.worker_extension_cls) or not parallel.worker_cls.startswith("vllm.")
    check = functools.partial(_refuse_method, custom)
    engine.collective_rpc = _guarded(engine.collective_rpc, check)


def _refuse(operation: Operation, given: Given) -> None:
    refused_if = _REFUSED_IF.get(operation.name)
    if refused_if is None or refused_if(given()):
        raise RequestRefused(f"kt: {operation.name}: {operation.reason}")


def _refuse_method(custom: bool, given: Given) -> None:
    """Refuses a worker method that is in the table, or that no tested version has. Functions pass,
    because their effects cannot be checked here; the workers refuse most of them."""
    name = given()["method"]
    if not isinstance(name, str):
        return
    operation = {entry.name: entry for entry in WORKER_OPERATIONS.refused}.get(name)
    if operation is not None:
        raise RequestRefused(f"kt: {name}: {operation.reason}")
    if name not in WORKER_OPERATIONS.accepted and not custom:
        raise RequestRefused(
            f"kt: {name}: this is not a known worker method, and it might change weights; install "
            "a tested version of vLLM, or start it without kt options"
        )


def _guarded(method: Callable[..., Any], check: Callable[[Given], None]) -> Callable[..., Any]:
    """The method, called only if ``check`` does not raise."""

    def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = inspect.signature(method).bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def call_later(*args: Any, **kwargs: Any) -> Any:
            check(functools.partial(arguments, args, kwargs))
            return await method(*args, **kwargs)

        return call_later

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        check(functools.partial(arguments, args, kwargs))
        return method(*args, **kwargs)

    return call
