"""Checks and conversions of tensors that users pass in."""

from __future__ import annotations

from typing import Any

import torch

#: Element types of hidden states and source weights, numbered as the compiled core numbers them.
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
DTYPE_NAMES = "bfloat16, float16, float32"


def need_tensor(place: str, value: Any) -> None:
    """Raises TypeError, naming ``place``, for anything but a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{place} must be a tensor, got {type(value).__name__}")


def need_dense(place: str, tensor: torch.Tensor) -> None:
    """Raises ValueError, naming ``place``, for a tensor without plain strided memory."""
    if tensor.is_nested:
        problem = "is nested"
    elif tensor.device.type == "meta":
        problem = "is on meta"
    elif tensor.layout != torch.strided:
        problem = f"has layout {tensor.layout}"
    else:
        return
    raise ValueError(f"{place} must be a dense tensor with data, but it {problem}")


def is_integer(tensor: torch.Tensor) -> bool:
    """Whether the dtype is an integer one (bool is not)."""
    return not (
        tensor.is_floating_point()
        or tensor.is_complex()
        or tensor.dtype == torch.bool
        or tensor.is_quantized
    )


def on_cpu(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The tensor, contiguous, on the CPU, without gradient; itself if it already is."""
    result = tensor.detach().to("cpu", dtype or tensor.dtype)
    return result.resolve_conj().resolve_neg().contiguous()
