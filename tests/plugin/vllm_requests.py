"""Runs in the vLLM environment: makes requests that would change or move an engine's weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Methods of a worker, with arguments. Functions that run in a worker can call them.
WORKER_METHODS: dict[str, tuple[Any, ...]] = {
    "add_lora": (None,),
    "checkpoint_prepare": (),
    "discard": (("weights",),),
    "elastic_ep_execute": ("",),
    "load_model": (),
    "reload_weights": (),
    "reset_weights": (),
    "save_sharded_state": ("folder",),
    "sleep": (2,),
    "start_weight_update": (),
    "update_config": ({},),
    "update_weights": ({},),
    "wake_up": (),
}


def ask(llm: Any, what: str) -> dict[str, str]:
    """Makes each request and returns the answers: an exception's text, or "served".

    what: "some" for those that an engine without kt options serves and survives, or "all".
    """
    requests: dict[str, Callable[[], Any]] = {
        "reload": lambda: llm.collective_rpc("reload_weights"),
        "sleep 1": lambda: llm.sleep(level=1),
        "wake up": llm.wake_up,
        "sleep 0": lambda: llm.sleep(level=0),
        "wake up again": llm.wake_up,
    }
    if what == "all":
        in_place = {"weights_iterator": iter(()), "is_checkpoint_format": False}
        requests |= {
            "sleep 2": lambda: llm.sleep(level=2),
            "reload in place": lambda: llm.collective_rpc("reload_weights", kwargs=in_place),
            "in the worker": lambda: llm.collective_rpc(_ask_worker)[0],
        }
    return {name: _answer(request) for name, request in requests.items()}


def _answer(request: Callable[[], Any]) -> str:
    try:
        result = request()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return result if isinstance(result, str) else "served"


def _ask_worker(worker: Any) -> str:
    """Names the methods that the worker did not refuse."""
    runner, model = worker.model_runner, worker.get_model()
    calls = [(worker, name, given) for name, given in WORKER_METHODS.items()]
    calls += [(runner, "reload_weights", ()), (model, "load_weights", (iter(()),))]
    served = []
    for owner, name, given in calls:
        try:
            getattr(owner, name)(*given)
        except ValueError as error:
            if str(error).startswith(f"kt: {name}: "):
                continue
        served.append(name)
    return f"not refused: {served}"
