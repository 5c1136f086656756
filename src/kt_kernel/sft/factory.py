"""Makes the wrapper of ``KTMoEWrapper(mode="sft")``."""

from __future__ import annotations

from typing import Any

from ..moe.settings import MAX_CHUNK, SFT_DEFAULTS, check_settings
from ..runtime.variant import kernel_table
from .base import BaseSFTMoEWrapper
from .settings import check_sft_settings

# With tiles, backward unpacks all weights once per chunk. Chunks of 2,048 tokens made steps 4 to 8%
# faster.
_TILE_CHUNK = 2 * MAX_CHUNK


def make_sft_wrapper(
    *,
    method: str,
    hidden_size: int,
    moe_intermediate_size: int,
    cpu_save: bool = False,
    max_deferred_experts_per_token: int | None = None,
    sft: dict[str, Any],
    **layer: Any,
) -> BaseSFTMoEWrapper:
    """The arguments are those of ``KTMoEWrapper``; ``sft`` has those of `SFT_DEFAULTS`. Deferral is
    for inference, so its argument is not used.

    Raises:
        TypeError, ValueError: an argument is wrong; names it, its value and what is accepted.
    """
    checked = check_sft_settings(
        method=method,
        hidden_size=hidden_size,
        moe_intermediate_size=moe_intermediate_size,
        **(SFT_DEFAULTS | sft),
    )
    if cpu_save and checked.method.base.name == method:
        raise ValueError(
            f"cpu_save=True: method {method} with group_size={checked.group_size} has no packed "
            "form on disk; pass cpu_save=False"
        )
    settings = check_settings(
        method=checked.method.base,
        hidden_size=hidden_size,
        moe_intermediate_size=moe_intermediate_size,
        cpu_save=cpu_save,
        sft=checked.arguments,
        max_chunk=_TILE_CHUNK if kernel_table() == "amx" else MAX_CHUNK,
        **layer,
    )
    if not settings.activation.is_swiglu:
        raise ValueError(
            f"mode='sft' with {settings.activation}; accepted: activation='silu' with gated=True "
            "and apply_router_weight_on_input=False"
        )
    return BaseSFTMoEWrapper(settings, checked)
