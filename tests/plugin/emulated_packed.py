"""Imported first in an engine's process without a GPU: the engine's kernels for packed hot experts
are replaced by their description in float64, and --kt-hot-format packed is accepted."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

import kt_kernel.serving.hot_format as hot_format
from kt_kernel.serving.option_table import PACKED

_why_not_packed = hot_format._why_not_packed


def _as_on_a_gpu(options: Any, device: str, *given: Any) -> str:
    return _why_not_packed(options, "cuda" if options.hot_format == PACKED else device, *given)


def _values(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, group: int
) -> torch.Tensor:
    """W [N, K] of an expert. group: 0 for 8 bits. Of 4 bits, the even column of two is in the low
    half of a byte, and so is the even row of two zero points."""
    if group == 0:
        return codes.double() * scale.double()[:, None]
    code = torch.stack([codes & 15, codes >> 4], -1).flatten(1).double()
    offset = torch.full_like(scale, 8, dtype=torch.float64)
    if zero is not None:
        offset = torch.stack([zero & 15, zero >> 4], 1).flatten(0, 1).double()
    return (code - offset.repeat_interleave(group, 1)) * scale.double().repeat_interleave(group, 1)


def _sum(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    rows: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    zeros: tuple[torch.Tensor | None, torch.Tensor | None],
    group: int,
) -> torch.Tensor:
    """rows: of each route in the weights, -1 for none."""
    total = torch.zeros(x.shape, dtype=torch.float64)
    for expert in rows.unique():
        if expert < 0:
            continue
        first, second = (
            _values(w[expert], s[expert], None if z is None else z[expert], group)
            for w, s, z in zip((w13, w2), scales, zeros, strict=True)
        )
        gate, up = (x.double() @ first.T).chunk(2, 1)
        share = (weights.double() * (rows == expert)).sum(1, keepdim=True)
        total += share * ((torch.nn.functional.silu(gate) * up) @ second.T)
    return total.to(x.dtype)


def _group(four_bits: bool, block_shape: list[int] | None) -> int:
    assert four_bits == (block_shape is not None)
    zero, group = block_shape or (0, 0)
    assert zero == 0
    return group


def _vllm(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    activation: Any,
    global_num_experts: int,
    expert_map: torch.Tensor,
    quant_config: Any,
) -> torch.Tensor:
    assert len(expert_map) == global_num_experts and activation.value == "silu"
    scales = quant_config.w1_scale, quant_config.w2_scale
    zeros = quant_config.w1_zp, quant_config.w2_zp
    group = _group(quant_config.use_int4_w4a16, quant_config.block_shape)
    assert quant_config.use_int8_w8a16 == (group == 0)
    return _sum(x, w13, w2, weights, expert_map[ids.long()], scales, zeros, group)


def _sglang(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    routes: Any,
    config: Any,
    *,
    use_int4_w4a16: bool,
    use_int8_w8a16: bool,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    w1_zp: torch.Tensor | None,
    w2_zp: torch.Tensor | None,
    block_shape: list[int] | None,
) -> torch.Tensor:
    assert use_int4_w4a16 != use_int8_w8a16
    assert not config.inplace and config.activation == "silu"
    assert config.num_experts != config.num_local_experts  # skips -1
    group = _group(use_int4_w4a16, block_shape)
    ids = routes.topk_ids.long()
    scales, zeros = (w1_scale, w2_scale), (w1_zp, w2_zp)
    return _sum(x, w13, w2, routes.topk_weights, ids, scales, zeros, group)


hot_format._why_not_packed = _as_on_a_gpu
if importlib.util.find_spec("vllm") is not None:
    from vllm.model_executor.layers.fused_moe import fused_moe

    fused_moe.fused_experts = _vllm
else:
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    fused_moe.fused_experts = _sglang
