"""The tensors of a step: their checks, and their way to and from the host."""

from __future__ import annotations

from typing import Any

import torch

from ..moe.settings import LayerSettings
from ..runtime.tensors import is_integer, need_dense, need_tensor, on_cpu
from .buffers import KExpertsSFTBuffer

Array = Any  # numpy.ndarray


def check_batch(s: LayerSettings, hidden_states: Any, expert_ids: Any, weights: Any) -> int:
    """Checks hidden states [..., H], expert ids [T, k] and router weights [T, k]; returns T.

    Raises:
        TypeError, ValueError: a type, shape or dtype is wrong, or T is above
            ``chunked_prefill_size`` where one is set.
    """
    tokens = check_hidden(s, "hidden_states", hidden_states)
    if 0 < s.chunked_prefill_size < tokens:
        raise ValueError(
            f"{s.where}: {tokens} tokens exceed chunked_prefill_size={s.chunked_prefill_size}; "
            "pass fewer tokens, or construct the wrapper with a larger size or -1"
        )
    k = s.num_experts_per_tok
    for name, tensor in (("expert_ids", expert_ids), ("weights", weights)):
        need_tensor(f"{s.where}: {name}", tensor)
        need_dense(f"{s.where}: {name}", tensor)
        if tuple(tensor.shape) != (tokens, k):
            raise ValueError(f"{s.where}: {name} must be [{tokens}, {k}], got {list(tensor.shape)}")
    if not is_integer(expert_ids):
        raise ValueError(
            f"{s.where}: expert_ids has dtype {expert_ids.dtype}; accepted: integer dtypes"
        )
    _need_float(s, "weights", weights)
    return tokens


def check_hidden(s: LayerSettings, name: str, tensor: Any) -> int:
    """Checks a tensor [..., H] of floats and returns T."""
    place = f"{s.where}: {name}"
    need_tensor(place, tensor)
    need_dense(place, tensor)
    if not tensor.dim() or tensor.shape[-1] != s.hidden_size:
        raise ValueError(f"{place} must be [..., {s.hidden_size}], got {list(tensor.shape)}")
    _need_float(s, name, tensor)
    return tensor.numel() // s.hidden_size


def _need_float(s: LayerSettings, name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        raise ValueError(f"{s.where}: {name} has dtype {tensor.dtype}; accepted: float dtypes")


def check_device(place: str, device: Any) -> torch.device | None:
    """A device for results; None for the CPU.

    Raises:
        TypeError, RuntimeError: what is no device, or one that this machine does not have.
    """
    if device is None:
        return None
    if not isinstance(device, torch.device | str):
        raise TypeError(f"{place} must be a torch.device, a string or None, got {device!r}")
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:  # the latter where torch has no CUDA
        raise RuntimeError(f"{place}={str(device)!r} cannot be used: {error}") from error
    return None if found.type == "cpu" else found


def on_host(
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    staging: torch.Tensor | None,
) -> torch.Tensor:
    """The tensor on the CPU, contiguous and in ``dtype``: in ``staging``, or where it is if it can
    be read there."""
    tensor = tensor.detach().reshape(shape)
    return on_cpu(tensor, dtype) if staging is None else staging.copy_(tensor, non_blocking=True)


def bf16_array(tensor: torch.Tensor) -> Array:
    """The bits of a bf16 tensor, which numpy has no dtype for, as uint16."""
    return tensor.view(torch.uint16).numpy()


class HostBatch:
    """The inputs of a forward pass on the host.

    Attributes:
        x: bf16 [T, H]. ids: int64 [T, k]. weights: float32 [T, k]. out: bf16 [T, H], not filled.
        buffer: where they are, to be released; None where they are used in place.
    """

    def __init__(
        self,
        hidden_states: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        tokens: int,
        hidden: int,
        buffer: KExpertsSFTBuffer | None,
    ) -> None:
        routes = tuple(expert_ids.shape)
        self.buffer = buffer
        staging: tuple[torch.Tensor | None, ...] = (None,) * 3
        if buffer is not None:
            staging = buffer.input_cpu, buffer.expert_ids_cpu, buffer.weights_cpu
        self.x = on_host(hidden_states, (tokens, hidden), torch.bfloat16, staging[0])
        self.ids = on_host(expert_ids, routes, torch.int64, staging[1])
        self.weights = on_host(weights, routes, torch.float32, staging[2])
        if buffer is None:
            self.out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device="cpu")
        else:
            self.out = buffer.output_cpu
        for tensor in (hidden_states, expert_ids, weights):
            wait_for_copies(tensor.device)

    @property
    def arrays(self) -> tuple[Array, Array, Array, Array]:
        """As the compiled core takes them."""
        return bf16_array(self.x), self.ids.numpy(), self.weights.numpy(), bf16_array(self.out)

    def result(self, device: torch.device | str | None) -> torch.Tensor:
        """The output [T, H] as a fresh tensor on ``device``, None for the CPU."""
        if self.buffer is None:
            return self.out if device is None else self.out.to(device)
        return self.out.clone() if device is None else self.out.to(device, copy=True)

    def release(self) -> None:
        """Gives the buffer back; the tensors must not be used any more."""
        if self.buffer is not None:
            self.buffer.release()
            self.buffer = None


def wait_for_copies(device: torch.device) -> None:
    """Waits until copies from a GPU, enqueued on its current stream, have arrived on the host."""
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


class NonFiniteGradient(RuntimeError, FloatingPointError):
    """A gradient has a value that is NaN or infinite: the training diverged."""


def first_bad_row(tensor: torch.Tensor) -> int | None:
    """Index along the first dimension of a value that is NaN or infinite; None where all are
    finite."""
    # The sum is cheap, and finite only where all values are.
    if not tensor.numel() or bool(tensor.sum(dtype=torch.float32).isfinite()):
        return None
    bad = (~tensor.isfinite()).flatten(1).any(1).nonzero()
    return int(bad[0]) if len(bad) else None
