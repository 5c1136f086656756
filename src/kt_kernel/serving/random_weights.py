"""Random weights for a model of an engine's own class, for ``kt model check``.

They depend on the names of the parameters alone, so the stock engine and kt-moe get the same ones.
Experts go through the engine's loading callback, as those of a checkpoint do.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch

from .small_model import VOCABULARY

_EXPERTS = ("w13_weight", "w2_weight")
_SPREAD = 0.15


@torch.no_grad()
def fill(model: torch.nn.Module, experts_of: Callable[[Any], int], moved: int = 0) -> None:
    """Sets all parameters of a model.

    experts_of: the number of experts of an engine's expert layer. moved: each expert gets the
        weights of the expert so many places before it.

    Raises:
        ValueError: experts have other parameters than two stacks of matrices.
    """
    for place, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if _EXPERTS[0] in own:
            _fill_experts(place, own, experts_of(module), moved)
            continue
        for name, parameter in own.items():
            _fill_one(f"{place}.{name}", parameter)


def _fill_experts(place: str, own: dict[str, torch.nn.Parameter], experts: int, moved: int) -> None:
    if tuple(own) != _EXPERTS:
        raise ValueError(
            f"{place}: experts with parameters {', '.join(own)}; accepted: {', '.join(_EXPERTS)}"
        )
    w13, w2 = own.values()
    gated = w13.shape[1] == 2 * w2.shape[2]
    for expert in range(experts):
        source = (expert - moved) % experts
        for shard in ("w1", "w3", "w2") if gated else ("w1", "w2"):
            parameter, name = (w2, _EXPERTS[1]) if shard == "w2" else (w13, _EXPERTS[0])
            rows, columns = parameter.shape[1:]
            size = (rows // 2 if gated and shard != "w2" else rows, columns)
            matrix = _matrix(f"{place}.{source}.{shard}", size)
            parameter.weight_loader(  # type: ignore[attr-defined]
                parameter, matrix, f"{place}.{name}", shard_id=shard, expert_id=expert
            )


def _fill_one(name: str, parameter: torch.nn.Parameter) -> None:
    """A vector stays near what its class sets, like the ones of a norm; integers, like a table of
    routes, stay below their largest value."""
    if not parameter.is_floating_point():
        if parameter.dtype != torch.bool and parameter.numel():
            top = max(int(parameter.max()), 0) + 1
            parameter.copy_(torch.randint(top, parameter.shape, generator=_generator(name)))
        return
    values = _matrix(name, tuple(parameter.shape)).to(parameter.dtype)
    if parameter.dim() < 2 and parameter.numel():
        first = parameter.flatten()[0]
        if (parameter == first).all() and abs(float(first)) <= 1:
            values += first.cpu()
    if name.endswith("lm_head.weight"):  # what stands for images must not follow in a text
        values[VOCABULARY:] = 0
    parameter.copy_(values)


def _matrix(name: str, size: tuple[int, ...]) -> torch.Tensor:
    """Of bfloat16 values. Outputs are about as large as inputs, or somewhat larger."""
    spread = min(_SPREAD, 2 / math.sqrt(size[-1])) if len(size) > 1 else _SPREAD
    return (torch.randn(size, generator=_generator(name)) * spread).bfloat16()


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))
