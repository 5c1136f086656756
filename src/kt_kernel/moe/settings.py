"""Checked settings of one MoE layer, made from the constructor's arguments."""

from __future__ import annotations

import numbers
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..runtime.pools import PoolPlan, plan_pools
from ..runtime.variant import kernel_kind, kernel_table
from ..weights.formats import LayerForm
from ..weights.methods import Method, get_method
from .activation import ExpertActivation, check_activation
from .placement import Placement
from .values import boolean, integer

MAX_DIMENSION = 65536  # of H and I
MAX_EXPERTS = 65536
MAX_CHUNK = 1024  # tokens per chunk; larger chunks are not faster in inference
_MAX_CHUNK_PAIRS = 65536  # token-expert pairs per chunk

#: The arguments that only mode="sft" reads, and their defaults. Inference stores them as given.
SFT_DEFAULTS: dict[str, Any] = {
    "lora_rank": 16,
    "lora_alpha": 32.0,
    "lora_dropout": 0.0,
    "max_cache_depth": 1,
    "group_size": 128,
    "zero_point": True,
    "full_weight_grad": False,
}


def check_sizes(
    form: Method | LayerForm, method: str, hidden_size: int, intermediate: int, where: str = ""
) -> None:
    """Raises ValueError for sizes that are not divisible by the weights' group size."""
    sizes = ("hidden_size", hidden_size), ("moe_intermediate_size", intermediate)
    for (name, size), unit in zip(sizes, form.units, strict=True):
        if size % unit:
            raise ValueError(
                f"{where + ': ' if where else ''}{name}={size} is not divisible by the group size "
                f"{unit} of {method}; accepted: multiples of {unit}, or a method without groups"
            )


def _weight_path(path: Any) -> str | os.PathLike[str] | None:
    """``path`` as given, checked; None for an empty string, which counts as not given."""
    if path is None or (isinstance(path, str) and not path):
        return None
    from ..checkpoint.paths import check_path  # the readers are not needed without a path

    check_path("weight_path", path)
    return path


def _chunked_prefill_size(given: Any) -> int:
    size = integer("chunked_prefill_size", -1 if given is None else given, -1)
    if size == 0:
        raise ValueError("chunked_prefill_size=0; accepted: -1 (unknown), 1 or more")
    return size


def _chunk_tokens(chunked_prefill_size: int, k: int, most: int) -> int:
    """Tokens per chunk, at most ``most``, which saves memory."""
    given = chunked_prefill_size if chunked_prefill_size > 0 else most
    return max(1, min(given, most, _MAX_CHUNK_PAIRS // k))


def placement_of(mask: Any, num_gpu_experts: int | None, num_experts: int) -> Placement:
    """The experts on the GPU, from a mask bool [E], a number of experts, or both.

    Raises:
        TypeError, ValueError: wrong type, dtype, length or count, or the two disagree.
    """
    if isinstance(mask, numbers.Integral) and not isinstance(mask, bool):
        # Older callers pass num_gpu_experts in place of the mask.
        if num_gpu_experts is not None and num_gpu_experts != mask:
            raise ValueError(
                f"num_gpu_experts={num_gpu_experts}, but {mask} was passed in place of "
                "gpu_experts_mask; give only one of them"
            )
        num_gpu_experts, mask = int(mask), None
    first = None
    if num_gpu_experts is not None:
        count = integer("num_gpu_experts", num_gpu_experts, 0, num_experts)
        first = Placement.first(num_experts, count)
    if mask is None:
        return first or Placement.first(num_experts, 0)
    placement = placement_of_mask(mask, num_experts)
    if num_gpu_experts is not None and first != placement:
        raise ValueError(
            f"num_gpu_experts={num_gpu_experts} means slots 0 to {num_gpu_experts - 1}, but "
            f"gpu_experts_mask has {list(placement.hot_experts)}; give only one of them"
        )
    return placement


def placement_of_mask(mask: Any, num_experts: int) -> Placement:
    """From gpu_experts_mask, bool [E]; TypeError or ValueError for anything else."""
    placement = Placement.from_mask(mask, "gpu_experts_mask")
    if placement.num_experts != num_experts:
        raise ValueError(
            f"gpu_experts_mask must be bool [{num_experts}], got torch.bool "
            f"[{placement.num_experts}]"
        )
    return placement


@dataclass(frozen=True)
class LayerSettings:
    """One MoE layer for inference, all values checked. See ``KTMoEWrapper``.

    Attributes beyond its arguments:
        placement: from ``gpu_experts_mask`` and ``num_gpu_experts``. The CPU gets the weights of
        its cold experts. max_tokens: tokens per chunk. max_deferred:
        ``max_deferred_experts_per_token``, 0 for None. table, kind: the kernels to use, see
        `variant`. sft: the arguments of ``SFT_DEFAULTS`` as given. scale_search: whether quantising
        to INT4_G32 and INT4_G128 searches the scales with the least error instead of using absmax /
        7. It takes several times as long; conversions use it.
    """

    layer_idx: int
    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    moe_intermediate_size: int
    placement: Placement
    pools: PoolPlan
    weight_path: str | os.PathLike[str] | None
    chunked_prefill_size: int
    cpu_save: bool
    max_tokens: int
    max_deferred: int
    method: Method
    table: str
    kind: int
    activation: ExpertActivation
    sft: Mapping[str, Any]
    scale_search: bool = False

    @property
    def where(self) -> str:
        """For error messages."""
        return f"layer {self.layer_idx}"

    @property
    def matrices(self) -> tuple[str, ...]:
        """The names of the matrices of an expert."""
        return self.activation.matrices

    @property
    def cpu_slots(self) -> list[bool]:
        """[E], whether the CPU gets the slot's weights."""
        return (~self.placement.mask).tolist()


def check_settings(
    *,
    layer_idx: int,
    num_experts: int,
    num_experts_per_tok: int,
    hidden_size: int,
    moe_intermediate_size: int,
    method: str | Method,
    gpu_experts_mask: Any = None,
    num_gpu_experts: int | None = None,
    cpuinfer_threads: int | None = None,
    threadpool_count: int | None = None,
    numa_nodes: Sequence[int] | None = None,
    weight_path: str | os.PathLike[str] | None = None,
    chunked_prefill_size: int | None = None,
    cpu_save: bool = False,
    max_deferred_experts_per_token: int | None = None,
    swiglu_limit: float | None = None,
    swiglu_alpha: float | None = None,
    activation: str = "silu",
    gated: bool = True,
    apply_router_weight_on_input: bool = False,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
    sft: Mapping[str, Any] | None = None,
    max_chunk: int = MAX_CHUNK,
) -> LayerSettings:
    """Checks the constructor's arguments; raises TypeError or ValueError naming the culprit.

    ``method`` is an inference method or the name of one. ``sft`` has those of the arguments in
    ``SFT_DEFAULTS`` that were given; they are not checked here.
    """
    chosen = method if isinstance(method, Method) else get_method(method)
    layer_idx = integer("layer_idx", layer_idx, 0)
    num_experts = integer("num_experts", num_experts, 1, MAX_EXPERTS)
    k = integer("num_experts_per_tok", num_experts_per_tok, 1, MAX_EXPERTS)
    hidden_size = integer("hidden_size", hidden_size, 1, MAX_DIMENSION)
    intermediate = integer("moe_intermediate_size", moe_intermediate_size, 1, MAX_DIMENSION)
    check_sizes(chosen, chosen.name, hidden_size, intermediate)
    boolean("cpu_save", cpu_save)
    act = check_activation(
        activation,
        gated,
        apply_router_weight_on_input,
        swiglu_limit=swiglu_limit,
        swiglu_alpha=swiglu_alpha,
        situ_beta=situ_beta,
        situ_linear_beta=situ_linear_beta,
    )
    if cpu_save and not act.gated:
        raise ValueError(
            "cpu_save=True with gated=False: packed directories hold experts with a gate only; "
            "accepted: cpu_save=False"
        )
    path = _weight_path(weight_path)
    if cpu_save and path is None:
        raise ValueError("cpu_save=True needs weight_path, the folder to write the packed layer to")
    chunked_prefill_size = _chunked_prefill_size(chunked_prefill_size)
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
        placement=placement_of(gpu_experts_mask, num_gpu_experts, num_experts),
        max_deferred=0
        if deferred is None
        else integer("max_deferred_experts_per_token", deferred, 0),
        weight_path=path,
        chunked_prefill_size=chunked_prefill_size,
        cpu_save=cpu_save,
        max_tokens=_chunk_tokens(chunked_prefill_size, k, max_chunk),
        method=chosen,
        activation=act,
        kind=kernel_kind(),
        table=kernel_table(),
        pools=plan_pools(cpuinfer_threads, threadpool_count, numa_nodes),
        sft=SFT_DEFAULTS | dict(sft or {}),
    )
