"""CUDA streams as users give them: a handle, a torch stream, or None for the current one."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

# Ten times as fast as current_stream; torch without CUDA lacks it.
_current_handle = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def on_stream(device: torch.device, stream: Any) -> Any:
    """Makes ``stream`` current for work on ``device``; does nothing on the CPU."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    if stream is None:
        return torch.cuda.device(device)
    if stream == 0:  # ExternalStream would treat 0 as "any stream"
        stream = torch.cuda.default_stream(device)
    elif isinstance(stream, int):
        stream = torch.cuda.ExternalStream(stream, device=device)
    return torch.cuda.stream(stream)


def handle_of(device: torch.device, stream: Any) -> int:
    """The handle of ``stream``, which must be one of the CUDA device.

    Raises ValueError for a torch stream of another device, and TypeError for anything but a stream.
    A bare handle cannot be checked; CUDA refuses an invalid one at the launch.
    """
    if stream is None:
        if _current_handle is None:
            return torch.cuda.current_stream(device).cuda_stream
        return _current_handle(device.index)
    if type(stream) is int:
        return stream
    handle = getattr(stream, "cuda_stream", None)
    if handle is None:
        raise TypeError(f"cuda_stream must be a CUDA stream, got {type(stream).__name__}")
    if stream.device != device:
        raise ValueError(f"cuda_stream is on {stream.device}, but hidden_states is on {device}")
    return handle
