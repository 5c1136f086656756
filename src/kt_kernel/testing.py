"""The layer in float64 with PyTorch: what every kernel's output is compared with.

Written from the specification's formulas, apart from the compiled core and from its reference:
an error would have to be made twice to go unnoticed. Scalars that decide a rounding (scales,
multipliers) are float32, as the rules say; everything else is float64.
"""

from __future__ import annotations

from typing import Any

import torch

from .methods import (
    BF16_ACTIVATIONS,
    BF16_WEIGHTS,
    INT4_GROUP,
    INT4_ROW,
    INT8_ROW,
    get_method,
)

# Relative error allowed to a float32 sum of products, against the sum of their absolute values.
_FLOAT32_NOISE = 2**-23


def _symmetric(
    w: torch.Tensor, levels: int, scale_of: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers and float32 scales of the last dimension: q = RNE(w * (levels / absmax))."""
    absmax = (w if scale_of is None else scale_of).abs().amax(-1, keepdim=True)
    top = torch.tensor(float(levels), dtype=torch.float32)
    multiplier = top / absmax
    # Where the division overflows (absmax zero or next to it) everything becomes zero.
    multiplier = torch.where(multiplier.isinf(), torch.zeros_like(multiplier), multiplier)
    return (w * multiplier).round().clamp(-levels, levels), absmax / top


def quantise_weights(method: str, weights: torch.Tensor) -> torch.Tensor:
    """What the packed weights of ``method`` stand for.

    Args:
        method: a supported method.
        weights: [..., N, K], bf16, fp16 or fp32, finite.

    Returns:
        float64 [..., N, K], the dequantised values.
    """
    chosen = get_method(method)
    w = weights.detach().cpu().float()
    if chosen.format == BF16_WEIGHTS:
        return w.bfloat16().double()
    if chosen.format in (INT8_ROW, INT4_ROW):
        q, scale = _symmetric(w, 127 if chosen.format == INT8_ROW else 7)
        return q.double() * scale.double()
    assert chosen.format == INT4_GROUP
    groups = w.unflatten(-1, (-1, chosen.group_size))
    scale = (groups.abs().amax(-1, keepdim=True) / 7).half().float()
    q = torch.where(scale == 0, torch.zeros_like(groups), (groups / scale).round().clamp(-7, 7))
    return (q.double() * scale.double()).flatten(-2)


def round_activations(
    values: torch.Tensor,
    activations: int,
    scale_of: torch.Tensor | None = None,
) -> torch.Tensor:
    """The one rounding of x or h [..., K] before a product, as float64.

    ``activations`` is one of the ``*_ACTIVATIONS`` numbers of ``methods``. A row with a value
    that is not finite becomes NaN where activations are integers. ``scale_of``: values to take the
    scales from instead.
    """
    values = values.float()
    if activations == BF16_ACTIVATIONS:
        return values.bfloat16().double()
    q, scale = _symmetric(values, 127, None if scale_of is None else scale_of.float())
    rounded = q.double() * scale.double()
    finite = values.isfinite().all(-1, keepdim=True)
    return torch.where(finite, rounded, torch.full_like(rounded, torch.nan))


def _activation(gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if alpha != 0:
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    return gate * torch.sigmoid(gate) * up


def moe_reference(*arguments: Any, **options: Any) -> torch.Tensor:
    """The CPU half of one MoE layer before the last rounding, float64 [T, H].

    Takes what ``moe_reference_with_noise`` takes.
    """
    return moe_reference_with_noise(*arguments, **options)[0]


def moe_reference_with_noise(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    method: str = "BF16",
    physical_to_logical_map: torch.Tensor | None = None,
    gpu_experts_mask: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
    swiglu_alpha: float = 0.0,
    rounded: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU half of one MoE layer, and how far correct kernels may be from it.

    A kernel that accumulates in float32 arrives at a slightly different h; where h is next to
    the middle between two values of its rounding, it may round the other way. The second result
    bounds what this and float32 sums can do to a row.

    Args:
        hidden: [T, H]; topk_ids: [T, k] slots; topk_weights: [T, k].
        gate, up: [E, I, H], down: [E, H, I], logical order, source weights; quantised here.
        method: decides the weights' and activations' rounding.
        physical_to_logical_map: [E]; None: the identity.
        gpu_experts_mask: bool [E], True = skipped; None: none.
        gate_bias, up_bias: [E, I], down_bias: [E, H].
        rounded: False leaves out all roundings, of weights too.

    Returns:
        (float64 [T, H], not rounded at the end; float64 [T], a bound of ‖y - ref‖₂).
    """
    chosen = get_method(method)
    experts = gate.shape[0]
    if physical_to_logical_map is None:
        physical_to_logical_map = torch.arange(experts)

    def weights_of(matrix: torch.Tensor) -> torch.Tensor:
        return quantise_weights(method, matrix) if rounded else matrix.double()

    def operand(values: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
        if not rounded:
            return values.double()
        return round_activations(values, chosen.activations, like)

    def bias_of(bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        return torch.zeros(1).double() if bias is None else bias[expert].float().double()

    x = operand(hidden)
    scores = topk_weights.float().double()
    y = torch.zeros(hidden.shape, dtype=torch.float64)
    noise = torch.zeros(hidden.shape[0], dtype=torch.float64)
    for slot in range(experts):
        if gpu_experts_mask is not None and bool(gpu_experts_mask[slot]):
            continue
        token, choice = (topk_ids == slot).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        e = int(physical_to_logical_map[slot])
        rows, score = x[token], scores[token, choice]
        matrices = [weights_of(every[e]) for every in (gate, up, down)]
        gate_out = rows @ matrices[0].T + bias_of(gate_bias, e)
        up_out = rows @ matrices[1].T + bias_of(up_bias, e)
        exact = _activation(gate_out, up_out, swiglu_limit, swiglu_alpha)
        h = operand(exact)
        out = h @ matrices[2].T + bias_of(down_bias, e)
        y.index_add_(0, token, out * score[:, None])

        gate_off = _FLOAT32_NOISE * (rows.abs() @ matrices[0].abs().T + bias_of(gate_bias, e).abs())
        up_off = _FLOAT32_NOISE * (rows.abs() @ matrices[1].abs().T + bias_of(up_bias, e).abs())
        off = (
            1.2 * gate_off * (up_out.abs() + 1)  # the activations' slope is below 1.2
            + gate_out.abs() * up_off
            + 4 * _FLOAT32_NOISE * exact.abs()
        )
        step = operand(exact + off, exact) - operand(exact - off, exact)
        columns = matrices[2].norm(dim=0)
        # Steps are few and count in full; the rest is many small independent errors.
        rest = ((off + _FLOAT32_NOISE * h.abs()) * columns).norm(dim=-1)
        per_row = step.abs() @ columns + 2 * rest + _FLOAT32_NOISE * bias_of(down_bias, e).norm()
        noise.index_add_(0, token, per_row * score.abs())
    return y, noise


def row_error(y: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """‖y - ref‖₂ / ‖ref‖₂ per row, float64 [T].

    A row that is zero in the reference counts 0 if it is exactly zero in ``y``, else infinity;
    a row that is NaN in the reference counts 0 if all of it is NaN in ``y``, else infinity.
    """
    y, reference = y.detach().cpu().double(), reference.double()
    size = reference.norm(dim=-1)
    error = (y - reference).norm(dim=-1) / size
    infinity = torch.full_like(size, torch.inf)
    none = torch.zeros_like(size)
    error = torch.where(size == 0, torch.where((y == 0).all(-1), none, infinity), error)
    error = torch.where(size.isnan(), torch.where(y.isnan().all(-1), none, infinity), error)
    return torch.where(error.isnan(), infinity, error)
