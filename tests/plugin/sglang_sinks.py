"""Attention with sinks for SGLang on a CPU without AMX. Imported first in SGLang's process.

SGLang's attention in torch has no sinks, and its kernels with them need AMX or a GPU. gpt-oss asks
for "intel_amx", which becomes "torch_native" on such a CPU; that is the one in torch with sinks.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention import torch_native_backend
from sglang.srt.layers.attention.attention_registry import register_attention_backend


@register_attention_backend("torch_native")
class SinksBackend(torch_native_backend.TorchNativeAttnBackend):
    """Each head's sink takes its part of the softmax, and adds nothing."""

    sinks: torch.Tensor | None = None  # [heads]

    def forward_extend(self, *given: Any, sinks: torch.Tensor | None = None, **more: Any) -> Any:
        return self._with(sinks, super().forward_extend, *given, **more)

    def forward_decode(self, *given: Any, sinks: torch.Tensor | None = None, **more: Any) -> Any:
        return self._with(sinks, super().forward_decode, *given, **more)

    def _with(self, sinks: torch.Tensor | None, forward: Any, *given: Any, **more: Any) -> Any:
        SinksBackend.sinks = sinks
        try:
            return forward(*given, **more)
        finally:
            SinksBackend.sinks = None


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None,
    enable_gqa: bool,
    scale: float,
    is_causal: bool,
) -> torch.Tensor:
    """torch's attention [1, heads, T, D], in float32 and with the sinks of the layer."""
    assert enable_gqa or key.shape[1] == query.shape[1]
    repeats = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(repeats, 1).float() for each in (key, value))
    scores = query.float() @ key.transpose(-1, -2) * scale
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    if SinksBackend.sinks is not None:
        sinks = SinksBackend.sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), -1)
    return (scores.softmax(-1)[..., : key.shape[2]] @ value).to(query.dtype)


torch_native_backend.scaled_dot_product_attention = attention
