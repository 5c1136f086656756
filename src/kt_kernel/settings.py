"""Checked settings of one MoE layer: what the constructor's arguments come to."""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .methods import Method, get_method
from .pools import PoolPlan, plan_pools
from .variant import kernel_kind, kernel_table

MAX_DIMENSION = 65536  # of H and I
MAX_EXPERTS = 65536
_GROUP_SIZE_NOT_GIVEN = 128  # the default of the interface's group_size argument
_DEFAULT_CHUNK = 1024  # tokens per chunk where chunked_prefill_size says nothing


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """``value`` as an int in low … high; TypeError or ValueError naming it otherwise."""
    if isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}") from None
    if number < low or (high is not None and number > high):
        accepted = f"{low} to {high}" if high is not None else f"{low} or more"
        raise ValueError(f"{name}={number}; accepted: {accepted}")
    return number


def _number(name: str, value: Any, low: float | None = None) -> float:
    if value is None:
        return 0.0
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {value!r}") from None
    if not math.isfinite(number) or (low is not None and number < low):
        accepted = "a finite number" + (f" of at least {low:g}" if low is not None else "")
        raise ValueError(f"{name}={number}; accepted: {accepted}")
    return number


def gpu_mask(mask: Any, num_gpu_experts: int | None, num_experts: int) -> torch.Tensor:
    """The experts on the GPU as bool [E] on the CPU, from either way of saying it.

    Raises:
        TypeError, ValueError: wrong type, dtype, length or count, or the two disagree.
    """
    if isinstance(mask, numbers.Integral) and not isinstance(mask, bool):
        # Older callers pass num_gpu_experts in the mask's place.
        if num_gpu_experts is not None and num_gpu_experts != mask:
            raise ValueError(
                f"num_gpu_experts={num_gpu_experts}, but {mask} was passed in the place of "
                "gpu_experts_mask; give one of them"
            )
        num_gpu_experts, mask = int(mask), None
    first = None
    if num_gpu_experts is not None:
        count = integer("num_gpu_experts", num_gpu_experts, 0, num_experts)
        first = torch.arange(num_experts, device="cpu") < count
    if mask is None:
        return (
            first if first is not None else torch.zeros(num_experts, dtype=torch.bool, device="cpu")
        )
    if not isinstance(mask, torch.Tensor):
        try:
            mask = torch.as_tensor(mask, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"gpu_experts_mask must be a bool tensor [{num_experts}], got {type(mask).__name__}"
            ) from None
    if mask.dtype != torch.bool or list(mask.shape) != [num_experts]:
        raise ValueError(
            f"gpu_experts_mask must be bool [{num_experts}], got {mask.dtype} {list(mask.shape)}"
        )
    mask = mask.detach().cpu().clone()
    if first is not None and not torch.equal(first, mask):
        raise ValueError(
            f"num_gpu_experts={num_gpu_experts} means slots 0 to {num_gpu_experts - 1}, but "
            f"gpu_experts_mask names {mask.nonzero().flatten().tolist()}; give one of them"
        )
    return mask


@dataclass(frozen=True)
class LayerSettings:
    """One MoE layer for inference, all values checked. See ``KTMoEWrapper``."""

    layer_idx: int
    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    moe_intermediate_size: int
    gpu_experts_mask: torch.Tensor
    pools: PoolPlan
    weight_path: str | None
    max_tokens: int
    max_deferred: int
    method: Method
    table: str
    kind: int
    swiglu_limit: float
    swiglu_alpha: float

    @property
    def where(self) -> str:
        """For error messages."""
        return f"layer {self.layer_idx}"

    @property
    def cpu_slots(self) -> list[bool]:
        return (~self.gpu_experts_mask).tolist()


def check_settings(
    *,
    layer_idx: int,
    num_experts: int,
    num_experts_per_tok: int,
    hidden_size: int,
    moe_intermediate_size: int,
    gpu_experts_mask: Any,
    num_gpu_experts: int | None,
    cpuinfer_threads: int | None,
    threadpool_count: int | None,
    numa_nodes: Sequence[int] | None,
    weight_path: str | os.PathLike[str] | None,
    chunked_prefill_size: int | None,
    cpu_save: bool,
    max_deferred_experts_per_token: int | None,
    method: str,
    group_size: int,
    full_weight_grad: bool,
    swiglu_limit: float | None,
    swiglu_alpha: float | None,
) -> LayerSettings:
    """Checks the constructor's arguments; raises TypeError or ValueError naming the culprit."""
    chosen = get_method(method)
    layer_idx = integer("layer_idx", layer_idx, 0)
    num_experts = integer("num_experts", num_experts, 1, MAX_EXPERTS)
    k = integer("num_experts_per_tok", num_experts_per_tok, 1, MAX_EXPERTS)
    hidden_size = integer("hidden_size", hidden_size, 1, MAX_DIMENSION)
    intermediate = integer("moe_intermediate_size", moe_intermediate_size, 1, MAX_DIMENSION)
    group = chosen.group_size
    if group:
        if group_size not in (group, _GROUP_SIZE_NOT_GIVEN):
            raise ValueError(f"method {method} has group_size={group}, got group_size={group_size}")
        for name, size in (("hidden_size", hidden_size), ("moe_intermediate_size", intermediate)):
            if size % group:
                raise ValueError(
                    f"{name}={size} is not divisible by the group size {group} of {method}; "
                    f"accepted: multiples of {group}, or a method without groups"
                )
    if cpu_save:
        raise ValueError("cpu_save=True is not supported yet; accepted: False")
    if full_weight_grad:
        raise ValueError("full_weight_grad=True is for mode='sft'; accepted here: False")
    if chunked_prefill_size is None:
        chunked_prefill_size = -1
    chunk = integer("chunked_prefill_size", chunked_prefill_size, -1)
    if chunk == 0:
        raise ValueError("chunked_prefill_size=0; accepted: -1 (not known), 1 or more")
    if threadpool_count is not None:
        threadpool_count = integer("threadpool_count", threadpool_count, 1)
    if cpuinfer_threads is not None:
        cpuinfer_threads = integer("cpuinfer_threads", cpuinfer_threads, 1)
    if numa_nodes is not None:
        if not isinstance(numa_nodes, Iterable):
            raise TypeError(f"numa_nodes must be a list of integers, got {numa_nodes!r}")
        numa_nodes = [integer("numa_nodes", node, 0) for node in numa_nodes]
    deferred = max_deferred_experts_per_token
    return LayerSettings(
        layer_idx=layer_idx,
        num_experts=num_experts,
        num_experts_per_tok=k,
        hidden_size=hidden_size,
        moe_intermediate_size=intermediate,
        gpu_experts_mask=gpu_mask(gpu_experts_mask, num_gpu_experts, num_experts),
        max_deferred=0
        if deferred is None
        else integer("max_deferred_experts_per_token", deferred, 0),
        weight_path=None if weight_path is None else os.fspath(weight_path),
        max_tokens=chunk if chunk > 0 else _DEFAULT_CHUNK,
        method=chosen,
        swiglu_limit=_number("swiglu_limit", swiglu_limit, 0.0),
        swiglu_alpha=_number("swiglu_alpha", swiglu_alpha),
        kind=kernel_kind(),
        table=kernel_table(),
        pools=plan_pools(cpuinfer_threads, threadpool_count, numa_nodes),
    )
