"""Computes the MoE layers of a loaded model on given inputs, in the process of either engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def blocks(model: torch.nn.Module, experts: str) -> Iterator[torch.nn.Module]:
    """The modules around expert layers, in order: with gate, routing and shared experts. If that is
    a whole layer of the model, with attention, the expert layers themselves.

    experts: the attribute that marks an expert layer.
    """
    for module in model.modules():
        if hasattr(module, experts):
            continue
        found = [child for child in module.children() if hasattr(child, experts)]
        yield from found if hasattr(module, "self_attn") else [module] * bool(found)


def router_beside(model: torch.nn.Module, block: torch.nn.Module) -> torch.nn.Module:
    """Of a model whose layers have the router beside such a module, as Gemma 4's."""
    return next(
        layer.router
        for layer in model.modules()
        if hasattr(layer, "router") and block in layer.children()
    )


def rank_outputs(path: str, rank: int) -> str:
    """The file of a rank's outputs. path: that of the first one."""
    return f"{path}.{rank}" if rank else path


def compute_all(
    model: torch.nn.Module, experts: str, compute: Callable[..., Any], one: dict[str, Any]
) -> None:
    """Writes the outputs [T, H] of all blocks, by number. one: a run of the job.

    compute: calls a block with x [T, H], with the numbers of tokens [T] or the router's results if
    it takes them, and with None for what else it needs.
    """
    given = load_file(one["inputs"])
    x, found = given["x"].to(next(model.parameters()).dtype), {}
    for number, block in enumerate(blocks(model, experts)):
        _, *others = inspect.signature(block.forward).parameters.values()
        more = {one.name: None for one in others if one.default is one.empty}
        takes = {one.name for one in others} & {"input_ids", "input_ids_global"}
        more |= dict.fromkeys(takes, given["tokens"])
        if "router_logits" in more:
            more["router_logits"] = router_beside(model, block)(x)
        out = compute(block, x.clone(), **more)
        out = out[0] if isinstance(out, tuple) else out
        found[str(number)] = out.float().reshape(given["x"].shape).clone()
    save_file(found, one["outputs"])
