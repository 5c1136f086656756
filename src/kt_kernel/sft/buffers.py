"""`KExpertsSFTBuffer`: host memory through which batches and gradients move."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from functools import cached_property
from typing import ClassVar

import torch

from ..moe.values import integer
from .lora import GRAD_NAMES, LORA_NAMES, lora_shapes, need_float_dtype

_lock = threading.Lock()


class KExpertsSFTBuffer:
    """Host buffers of one batch, pinned where there is a GPU.

    The wrappers take buffers of their own (`take`), so what `get_buffer` returns is never written
    by them.

    Attributes:
        input_cpu, output_cpu, grad_output_cpu, grad_input_cpu: [qlen, H] in ``dtype``.
        expert_ids_cpu: int64 [qlen, k].
        weights_cpu, grad_weights: float32 [qlen, k].
        bsz_tensor: qlen as int32 [1].
        grad_gate_lora_a … grad_down_lora_b: gradients of the LoRA tensors, float32; made when they
            are first used.
    """

    capture_buffers: ClassVar[dict[Hashable, KExpertsSFTBuffer]] = {}
    _free: ClassVar[dict[Hashable, list[KExpertsSFTBuffer]]] = {}

    def __init__(
        self,
        qlen: int,
        hidden_size: int,
        moe_intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        lora_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.qlen = qlen
        self.hidden_size = hidden_size
        self.moe_intermediate_size = moe_intermediate_size
        self.num_experts = num_experts
        self.num_experts_per_tok = num_experts_per_tok
        self.lora_rank = lora_rank
        self.dtype = dtype
        self._key: Hashable = None
        self._taken = False
        hidden, routes = (qlen, hidden_size), (qlen, num_experts_per_tok)
        self.input_cpu = _host(hidden, dtype)
        self.expert_ids_cpu = _host(routes, torch.int64)
        self.weights_cpu = _host(routes, torch.float32)
        self.output_cpu = _host(hidden, dtype)
        self.grad_output_cpu = _host(hidden, dtype)
        self.grad_input_cpu = _host(hidden, dtype)
        self.grad_weights = _host(routes, torch.float32)
        self.bsz_tensor = torch.tensor([qlen], dtype=torch.int32, device="cpu")

    @cached_property
    def _grads(self) -> dict[str, torch.Tensor]:
        shapes = lora_shapes(
            self.num_experts, self.lora_rank, self.hidden_size, self.moe_intermediate_size
        )
        return {f"grad_{name}": _host(shapes[name], torch.float32) for name in LORA_NAMES}

    def __getattr__(self, name: str) -> torch.Tensor:
        if name in GRAD_NAMES:
            return self._grads[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        parts += vars(self).get("_grads", {}).values()
        return sum(part.nbytes for part in parts)

    @classmethod
    def get_buffer(
        cls,
        qlen: int,
        hidden_size: int,
        moe_intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        lora_rank: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> KExpertsSFTBuffer:
        """The buffer for such batches: the same one for the same arguments, until `clear_cache`.

        Of batches that differ in ``qlen`` alone only the latest buffer is kept.

        Raises:
            TypeError, ValueError: a number that is no integer or below 1 (``qlen``: below 0), or
                what is no float dtype.
        """
        qlen = integer("qlen", qlen, 0)
        shape = (
            integer("hidden_size", hidden_size, 1),
            integer("moe_intermediate_size", moe_intermediate_size, 1),
            integer("num_experts", num_experts, 1),
            integer("num_experts_per_tok", num_experts_per_tok, 1),
            integer("lora_rank", lora_rank, 1),
            need_float_dtype("dtype", dtype),
        )
        with _lock:
            buffer = cls.capture_buffers.get(shape)
            if buffer is None or buffer.qlen != qlen:
                buffer = cls.capture_buffers[shape] = cls(qlen, *shape)
            return buffer

    @classmethod
    def take(
        cls,
        qlen: int,
        hidden_size: int,
        moe_intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        lora_rank: int,
    ) -> KExpertsSFTBuffer:
        """An unused bf16 buffer, which belongs to the caller until `release`."""
        shape = hidden_size, moe_intermediate_size, num_experts, num_experts_per_tok, lora_rank
        with _lock:
            free = cls._free.get(shape, [])
            for index, buffer in enumerate(free):
                if buffer.qlen == qlen:
                    buffer._taken = True
                    return free.pop(index)
        buffer = cls(qlen, *shape)
        buffer._key, buffer._taken = shape, True
        return buffer

    def release(self) -> None:
        """Gives a buffer of `take` back. Buffers of another batch size are let go.

        Raises:
            RuntimeError: it is no buffer of `take`, or was given back already.
        """
        with _lock:
            if not self._taken:
                raise RuntimeError("release of a buffer that is not taken; call take first")
            self._taken = False
            kept = [other for other in self._free.get(self._key, []) if other.qlen == self.qlen]
            self._free[self._key] = [*kept[: _KEPT - 1], self]

    @classmethod
    def clear_cache(cls) -> int:
        """Lets go of all buffers that nobody uses; returns their bytes. Those that a caller holds
        stay valid."""
        with _lock:
            kept = [
                *cls.capture_buffers.values(),
                *(b for free in cls._free.values() for b in free),
            ]
            cls.capture_buffers.clear()
            cls._free.clear()
        return sum(buffer.nbytes for buffer in kept)


_KEPT = 2  # unused buffers for each shape


def _renew_lock_after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_renew_lock_after_fork)


def _host(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    # device="cpu" spelled out: models may be built and run under a device context.
    with torch.inference_mode(False):  # or they could not be written outside of it
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_available())
