"""The public interface: `KTMoEWrapper`, the factory of layer wrappers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

import torch

from .moe.cpu_buffer import KExpertsCPUBuffer
from .moe.inference import InferenceMoEWrapper
from .moe.routing import select_deferred_experts
from .moe.settings import check_settings
from .moe.wrapper import BaseMoEWrapper
from .weights.methods import INFERENCE_METHODS, SFT_METHODS

if TYPE_CHECKING:
    from .sft.base import BaseSFTMoEWrapper

__all__ = [
    "INFERENCE_METHODS",
    "SFT_METHODS",
    "AMXMoEWrapper",
    "BaseMoEWrapper",
    "InferenceMoEWrapper",
    "KExpertsCPUBuffer",
    "KTMoEWrapper",
]

_BEFORE_MODE = 13  # positional parameters of the constructor before ``mode``
# The parameters that follow in kt-kernel 0.7.2.
_OLDER_ORDER = (
    "numa_nodes",
    "mode",
    "num_gpu_experts",
    "lora_rank",
    "lora_alpha",
    "lora_dropout",
    "max_cache_depth",
    "group_size",
    "zero_point",
    "full_weight_grad",
    "swiglu_limit",
    "swiglu_alpha",
)

_New = TypeVar("_New", bound=Callable[..., Any])


def _takes_older_order(new: _New) -> _New:
    """Also accepts positional arguments in the order of kt-kernel 0.7.2, which has ``numa_nodes``
    in place of ``mode``: a list or None there distinguishes the two."""

    @functools.wraps(new)
    def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
        given = args[_BEFORE_MODE:]
        if given and (given[0] is None or _is_list(given[0])):
            if len(given) > len(_OLDER_ORDER):
                raise TypeError(
                    f"KTMoEWrapper takes at most {_BEFORE_MODE + len(_OLDER_ORDER)} positional "
                    f"arguments with numa_nodes before mode, got {len(args)}"
                )
            older = dict(zip(_OLDER_ORDER, given, strict=False))
            for name in older.keys() & kwargs.keys():
                raise TypeError(f"KTMoEWrapper got multiple values for argument {name!r}")
            args, kwargs = args[:_BEFORE_MODE], kwargs | older
        return new(cls, *args, **kwargs)

    return cast(_New, construct)


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


class KTMoEWrapper:
    """Creates the object that computes one MoE layer's experts on the CPU.

    Every argument is a read-only attribute of that object. If it was None or omitted, the attribute
    has the selected value.

    Args:
        layer_idx: number of the layer; selects the tensors of the checkpoint and orders deferral.
        num_experts: E. num_experts_per_tok: k. hidden_size: H. moe_intermediate_size: I.
        gpu_experts_mask: bool [E], True = on the GPU (skipped here). An int is taken as
            ``num_gpu_experts``.
        cpuinfer_threads: threads in all pools; None: as many as saturate the read bandwidth.
        threadpool_count: pools; None: one per NUMA node in use.
        weight_path: checkpoint file, folder or packed directory for ``load_weights``. An empty
            string counts as not given.
        chunked_prefill_size: largest batch expected, -1 if unknown. It only sizes buffers, and very
            large values are reduced.
        cpu_save: also write all experts of the packed layer to disk. Weights from tensors go to the
            packed directory ``weight_path``, which is created if it does not exist. Weights from a
            checkpoint go to the subfolder ``kt-packed`` of ``weight_path`` (for a file: of its
            folder), and are loaded from there the next time.
        max_deferred_experts_per_token: d, experts per token that a layer may defer to the next.
        method: weight format, one of ``INFERENCE_METHODS`` (of ``SFT_METHODS`` with mode="sft").
        mode: "inference" or "sft". A positional list or None here is taken as ``numa_nodes``, and
            the positional arguments after it in the order of kt-kernel 0.7.2.
        num_gpu_experts: n puts slots 0 … n-1 on the GPU; it must agree with a mask.
        numa_nodes: NUMA node of each pool.
        swiglu_limit: > 0 clamps gate from above and up to ±limit.
        swiglu_alpha: != 0 uses ``gate * sigmoid(alpha * gate) * (up + 1)``.
        activation: act of an expert, ``down(act(gate(x)) * up(x))``: "silu", "gelu" (with erf),
            "gelu_tanh" or "relu2", the square of ReLU. swiglu_limit and swiglu_alpha are for "silu"
            with a gate. "situ": SituGLU, ``situ_beta * tanh(gate / situ_beta) * sigmoid(gate) *
            up``. "swiglustep": ``silu(gate) * up``, where swiglu_limit clamps silu(gate) from above
            and up to ±limit.
        gated: False: experts have no gate and compute ``down(act(up(x)))``.
        apply_router_weight_on_input: the router weight w multiplies the input of an expert, not its
            output: ``expert(w * x)``. Biases are not multiplied.
        situ_beta: for "situ"; None: 1. situ_linear_beta: > 0 replaces up by ``situ_linear_beta *
            tanh(up / situ_linear_beta)``.
        lora_rank, lora_alpha: R, and alpha of the LoRA factor alpha / R.
        lora_dropout: probability, 0 up to but not 1, applied to the input of the A matrices.
        max_cache_depth: forward passes that may wait for their backward.
        group_size: columns per scale of the KGroup methods.
        zero_point: whether AMXINT4_1KGroup_SFT has zero points.
        full_weight_grad: also compute gradients of the base weights.

    The last seven are for mode="sft"; inference ignores them.

    Returns:
        An ``InferenceMoEWrapper``, or a ``BaseSFTMoEWrapper`` for mode="sft".

    Raises:
        TypeError, ValueError: an argument is wrong; names it, its value and what is accepted.
    """

    @overload
    def __new__(  # type: ignore[misc]
        cls,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        gpu_experts_mask: torch.Tensor | int | None = ...,
        cpuinfer_threads: int | None = ...,
        threadpool_count: int | None = ...,
        weight_path: str | os.PathLike[str] | None = ...,
        chunked_prefill_size: int | None = ...,
        cpu_save: bool = ...,
        max_deferred_experts_per_token: int | None = ...,
        method: str = ...,
        mode: Literal["inference"] = ...,
        num_gpu_experts: int | None = ...,
        lora_rank: int = ...,
        lora_alpha: float = ...,
        max_cache_depth: int = ...,
        group_size: int = ...,
        zero_point: bool = ...,
        *,
        numa_nodes: Sequence[int] | None = ...,
        lora_dropout: float = ...,
        full_weight_grad: bool = ...,
        swiglu_limit: float | None = ...,
        swiglu_alpha: float | None = ...,
        activation: str = ...,
        gated: bool = ...,
        apply_router_weight_on_input: bool = ...,
        situ_beta: float | None = ...,
        situ_linear_beta: float | None = ...,
    ) -> InferenceMoEWrapper: ...

    @overload
    def __new__(  # type: ignore[misc]
        cls,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        gpu_experts_mask: torch.Tensor | int | None = ...,
        cpuinfer_threads: int | None = ...,
        threadpool_count: int | None = ...,
        weight_path: str | os.PathLike[str] | None = ...,
        chunked_prefill_size: int | None = ...,
        cpu_save: bool = ...,
        max_deferred_experts_per_token: int | None = ...,
        method: str = ...,
        *,
        mode: Literal["sft"],
        num_gpu_experts: int | None = ...,
        lora_rank: int = ...,
        lora_alpha: float = ...,
        max_cache_depth: int = ...,
        group_size: int = ...,
        zero_point: bool = ...,
        numa_nodes: Sequence[int] | None = ...,
        lora_dropout: float = ...,
        full_weight_grad: bool = ...,
        swiglu_limit: float | None = ...,
        swiglu_alpha: float | None = ...,
        activation: str = ...,
        gated: bool = ...,
        apply_router_weight_on_input: bool = ...,
        situ_beta: float | None = ...,
        situ_linear_beta: float | None = ...,
    ) -> BaseSFTMoEWrapper: ...

    @_takes_older_order
    def __new__(  # type: ignore[misc]
        cls,
        layer_idx: int,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        moe_intermediate_size: int,
        gpu_experts_mask: torch.Tensor | int | None = None,
        cpuinfer_threads: int | None = None,
        threadpool_count: int | None = None,
        weight_path: str | os.PathLike[str] | None = None,
        chunked_prefill_size: int | None = -1,
        cpu_save: bool = False,
        max_deferred_experts_per_token: int | None = None,
        method: str = "AMXINT4",
        mode: str = "inference",
        num_gpu_experts: int | None = None,
        lora_rank: int = 16,
        lora_alpha: float = 32.0,
        max_cache_depth: int = 1,
        group_size: int = 128,
        zero_point: bool = True,
        *,
        numa_nodes: Sequence[int] | None = None,
        lora_dropout: float = 0.0,
        full_weight_grad: bool = False,
        swiglu_limit: float | None = 0.0,
        swiglu_alpha: float | None = 0.0,
        activation: str = "silu",
        gated: bool = True,
        apply_router_weight_on_input: bool = False,
        situ_beta: float | None = None,
        situ_linear_beta: float | None = None,
    ) -> InferenceMoEWrapper | BaseSFTMoEWrapper:
        given: dict[str, Any] = dict(
            layer_idx=layer_idx,
            num_experts=num_experts,
            num_experts_per_tok=num_experts_per_tok,
            hidden_size=hidden_size,
            moe_intermediate_size=moe_intermediate_size,
            gpu_experts_mask=gpu_experts_mask,
            num_gpu_experts=num_gpu_experts,
            cpuinfer_threads=cpuinfer_threads,
            threadpool_count=threadpool_count,
            numa_nodes=numa_nodes,
            weight_path=weight_path,
            chunked_prefill_size=chunked_prefill_size,
            cpu_save=cpu_save,
            max_deferred_experts_per_token=max_deferred_experts_per_token,
            method=method,
            swiglu_limit=swiglu_limit,
            swiglu_alpha=swiglu_alpha,
            activation=activation,
            gated=gated,
            apply_router_weight_on_input=apply_router_weight_on_input,
            situ_beta=situ_beta,
            situ_linear_beta=situ_linear_beta,
            sft={
                "lora_rank": lora_rank,
                "lora_alpha": lora_alpha,
                "lora_dropout": lora_dropout,
                "max_cache_depth": max_cache_depth,
                "group_size": group_size,
                "zero_point": zero_point,
                "full_weight_grad": full_weight_grad,
            },
        )
        if mode == "sft":
            from .sft.factory import make_sft_wrapper  # inference does not need it

            return make_sft_wrapper(**given)
        if mode != "inference":
            raise ValueError(f"unknown mode {mode!r}; accepted: 'inference', 'sft'")
        return InferenceMoEWrapper(check_settings(**given))

    set_capture_batch_sizes = staticmethod(BaseMoEWrapper.set_capture_batch_sizes)
    get_capture_batch_sizes = staticmethod(BaseMoEWrapper.get_capture_batch_sizes)
    clear_buffer_cache = staticmethod(BaseMoEWrapper.clear_buffer_cache)
    clear_sft_buffer_cache = staticmethod(BaseMoEWrapper.clear_sft_buffer_cache)
    select_deferred_experts = staticmethod(select_deferred_experts)


#: The name that kt-kernel has for methods AMXINT4 and AMXINT8.
AMXMoEWrapper = KTMoEWrapper
