"""Checks of the arguments that only mode="sft" reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..moe.values import float32, integer, real
from .methods import SftMethod, get_sft_method

MAX_RANK = 4096


def need_bool(name: str, value: Any) -> None:
    """Raises TypeError, naming the argument, for anything but True and False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


@dataclass(frozen=True)
class SftSettings:
    """The arguments of one layer's fine-tuning, checked. See ``KTMoEWrapper``."""

    method: SftMethod
    lora_rank: int
    lora_alpha: float
    lora_dropout: float
    max_cache_depth: int
    group_size: int
    zero_point: bool
    full_weight_grad: bool

    @property
    def scaling(self) -> float:
        """alpha / R."""
        return self.lora_alpha / self.lora_rank

    @property
    def arguments(self) -> dict[str, Any]:
        """By the names of the constructor's arguments."""
        return {name: value for name, value in vars(self).items() if name != "method"}


def check_sft_settings(
    *,
    method: str,
    hidden_size: int,
    moe_intermediate_size: int,
    lora_rank: int,
    lora_alpha: float,
    lora_dropout: float,
    max_cache_depth: int,
    group_size: int,
    zero_point: bool,
    full_weight_grad: bool,
) -> SftSettings:
    """Raises TypeError or ValueError naming the argument, its value and what is accepted."""
    hidden_size = integer("hidden_size", hidden_size, 1)
    moe_intermediate_size = integer("moe_intermediate_size", moe_intermediate_size, 1)
    rank = integer("lora_rank", lora_rank, 1, MAX_RANK)
    alpha = real("lora_alpha", lora_alpha, 0.0)
    if alpha == 0:
        raise ValueError(f"lora_alpha={lora_alpha}; accepted: a number above 0")
    dropout = real("lora_dropout", lora_dropout, 0.0)
    if float32(dropout) >= 1:
        raise ValueError(f"lora_dropout={lora_dropout}; accepted: 0 up to, but not, 1 (in float32)")
    depth = integer("max_cache_depth", max_cache_depth, 1)
    group_size = integer("group_size", group_size, 1)
    if group_size % 32:
        raise ValueError(f"group_size={group_size}; accepted: multiples of 32")
    need_bool("zero_point", zero_point)
    need_bool("full_weight_grad", full_weight_grad)
    return SftSettings(
        method=get_sft_method(method, group_size, zero_point, hidden_size, moe_intermediate_size),
        lora_rank=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        max_cache_depth=depth,
        group_size=group_size,
        zero_point=zero_point,
        full_weight_grad=full_weight_grad,
    )
