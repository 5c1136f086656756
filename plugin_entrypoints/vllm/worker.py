"""vLLM plugin: changes in a worker whose engine has kt options.

Only the worker object is changed; its class stays unchanged.
"""

import functools
from collections.abc import Callable
from typing import Any

from kt_kernel.serving import cache, recording
from kt_kernel.serving.option_table import OptionError

from .. import failure
from .contract import CONTRACT, MODEL_OPERATIONS, RUNNER_OPERATIONS, WORKER_OPERATIONS
from .requests import guard
from .slot import taken

# Methods besides load_model that vLLM calls at the start and in which our code runs.
_STARTING = ("determine_available_memory", "initialize_from_config", "compile_or_warm_up_model")


def prepare(worker: Any) -> None:
    """Makes a new worker build our expert layers and report our errors. Once the model is loaded,
    the worker refuses requests that would change or move weights."""
    worker.load_model = _telling(_loading(worker, worker.load_model), exits=True)
    worker.compile_or_warm_up_model = _after_warm_up(worker.compile_or_warm_up_model)
    for name in _STARTING:
        # vLLM calls these in a loop and waits for an answer.
        setattr(worker, name, _telling(getattr(worker, name), exits=False))


def _loading(worker: Any, load_model: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_model)
    def load(*args: Any, **kwargs: Any) -> Any:
        with taken():
            result = load_model(*args, **kwargs)
        model = worker.get_model()
        _verify(model)
        for owner, operations in (
            (worker, WORKER_OPERATIONS.refused),
            (worker.model_runner, RUNNER_OPERATIONS),
            (model, MODEL_OPERATIONS),
        ):
            guard(owner, operations)
        failure.confirm()
        return result

    return load


def _after_warm_up(warm_up: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the last step of the start: its dummy batches are not recorded, and experts do not move
    before its end."""

    @functools.wraps(warm_up)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = warm_up(*args, **kwargs)
        recording.begin()
        cache.begin()
        return result

    return call


def _verify(model: Any) -> None:
    """Raises OptionError unless the model has expert layers and all of them are ours."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

    from .layer import HybridExperts

    found = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    others = {type(module).__name__ for module in found if not isinstance(module, HybridExperts)}
    if not found or others:
        raise OptionError(
            f"model class {type(model).__name__}: its experts are "
            f"{', '.join(sorted(others)) or 'not computed by vLLM itself'}, which kt-moe cannot "
            "replace; remove the kt options"
        )


def _telling(method: Callable[..., Any], exits: bool) -> Callable[..., Any]:
    """Wraps the method: if our code fails in it, the user's process ends with that error."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            failure.end(error, CONTRACT.package, exits=exits)
            raise

    return call
