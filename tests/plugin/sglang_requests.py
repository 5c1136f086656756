"""Runs in the SGLang environment: makes requests to a running engine that concern its weights.

Each is made through the methods of ``Engine`` or, if its name begins with "scheduler:", sent
directly to the scheduler, as servers without a TokenizerManager do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.managers import io_struct

EXPERT = "model.layers.0.mlp.experts.0.up_proj.weight"
FOLDER = {"path": "/nowhere", "pattern": None, "max_size": None}

ENGINE: dict[str, Callable[[Any], Any]] = {
    "update_weights_from_disk": lambda engine: engine.update_weights_from_disk(
        engine.server_args.model_path
    ),
    "update_weights_from_tensor": lambda engine: engine.update_weights_from_tensor(
        [("model.norm.weight", torch.ones(128))]
    ),
    "update_weights_from_distributed": lambda engine: engine.update_weights_from_distributed(
        ["model.norm.weight"], ["float32"], [[128]]
    ),
    "update_weights_from_ipc": lambda engine: engine.update_weights_from_ipc({}),
    "init_weights_update_group": lambda engine: engine.init_weights_update_group(
        "localhost", 1, 0, 1, "group"
    ),
    "destroy_weights_update_group": lambda engine: engine.destroy_weights_update_group("group"),
    "begin_weight_update": lambda engine: engine.begin_weight_update(),
    "end_weight_update": lambda engine: engine.end_weight_update(),
    "release_memory_occupation": lambda engine: engine.release_memory_occupation(),
    "resume_memory_occupation": lambda engine: engine.resume_memory_occupation(),
    "get_weights_by_name": lambda engine: engine.get_weights_by_name(EXPERT),
    "load_lora_adapter": lambda engine: engine.load_lora_adapter("adapter", "/nowhere"),
    "load_lora_adapter_from_tensors": lambda engine: engine.load_lora_adapter_from_tensors(
        "adapter", {}, {}
    ),
    "unload_lora_adapter": lambda engine: engine.unload_lora_adapter("adapter"),
    "save_sharded_model": lambda engine: engine.save_sharded_model(**FOLDER),
    "save_remote_model": lambda engine: engine.save_remote_model(url="file:///nowhere"),
    "scheduler:save_sharded_model": lambda engine: engine.collective_rpc(
        "save_sharded_model", **FOLDER
    ),
}
# Requests to the scheduler: the communicator that sends them, and the message.
SCHEDULER: dict[str, tuple[str, Any]] = {
    "update_weights_from_tensor": (
        "update_weights_from_tensor",
        io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[b"x"]),
    ),
    "release_memory_occupation": (
        "release_memory_occupation",
        io_struct.ReleaseMemoryOccupationReqInput(),
    ),
    "check_weights": ("check_weights", io_struct.CheckWeightsReqInput(action="reset_tensors")),
    "get_weights_by_name": (
        "get_weights_by_name",
        io_struct.GetWeightsByNameReqInput(name="model.layers.0.mlp.experts.w13_weight"),
    ),
    "unload_lora_adapter": (
        "update_lora_adapter",
        io_struct.UnloadLoRAAdapterReqInput(lora_name="adapter"),
    ),
}
ALL = [*ENGINE, *(f"scheduler:{name}" for name in SCHEDULER)]


def make(engine: Any, names: list[str] | None) -> dict[str, str]:
    """Makes the requests (all of them if names is None). Returns answers or errors as text."""
    return {name: _make(engine, name) for name in names or ALL}


def _make(engine: Any, name: str) -> str:
    try:
        if name in ENGINE:
            return str(ENGINE[name](engine))
        communicator, message = SCHEDULER[name.removeprefix("scheduler:")]
        manager = engine.tokenizer_manager
        manager.auto_create_handle_loop()
        send = getattr(manager, f"{communicator}_communicator")
        return str(engine.loop.run_until_complete(send(message)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
