"""Which experts go on the GPU."""

from __future__ import annotations

import operator

import torch

from .tensors import need_dense


def generate_gpu_experts_masks(activation_freq: torch.Tensor, num_gpu_experts: int) -> torch.Tensor:
    """Puts the globally most frequent layer-expert pairs on the GPU.

    Args:
        activation_freq: [L, E], how often expert e of layer l was chosen; any real dtype, any
            device.
        num_gpu_experts: total over all layers, not per layer; clamped to 0 … L·E.

    Returns:
        bool [L, E] on the CPU, True = on the GPU. Equal frequencies: the lower layer first, then
        the lower expert.

    Raises:
        TypeError: ``activation_freq`` is not a tensor or ``num_gpu_experts`` not an integer.
        ValueError: not two-dimensional, not dense, complex, or with a NaN.
    """
    if not isinstance(activation_freq, torch.Tensor):
        raise TypeError(
            f"activation_freq must be a tensor [L, E], got {type(activation_freq).__name__}"
        )
    need_dense("activation_freq", activation_freq)
    if isinstance(num_gpu_experts, bool):
        raise TypeError("num_gpu_experts must be an integer, got bool")
    try:
        count = operator.index(num_gpu_experts)
    except TypeError:
        raise TypeError(
            f"num_gpu_experts must be an integer, got {type(num_gpu_experts).__name__}"
        ) from None
    if activation_freq.dim() != 2:
        raise ValueError(
            f"activation_freq must have shape [L, E], got {list(activation_freq.shape)}"
        )
    if activation_freq.is_complex():
        raise ValueError(f"activation_freq must be real, got {activation_freq.dtype}")
    flat = activation_freq.detach().cpu().reshape(-1)
    if flat.dtype == torch.bool:
        flat = flat.to(torch.uint8)
    elif flat.is_floating_point():
        flat = flat.double()
        if bool(flat.isnan().any()):
            where = int(flat.isnan().nonzero()[0])
            layer, expert = divmod(where, activation_freq.shape[1])
            raise ValueError(f"activation_freq[{layer}, {expert}] is NaN")
    count = min(max(count, 0), flat.numel())
    order = torch.sort(flat, descending=True, stable=True).indices[:count]
    mask = torch.zeros(flat.numel(), dtype=torch.bool, device="cpu")
    mask[order] = True
    return mask.reshape(activation_freq.shape)
