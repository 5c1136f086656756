"""`KExpertsCPUBuffer`: host and device buffers for callers that copy batches themselves."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import ClassVar

import torch

from ..runtime.tensors import need_dense, need_tensor
from . import buffers

Buffers = tuple[list[torch.Tensor], ...]


class _AnnouncedSizes(type):
    """Makes the class attribute ``capture_bs`` the list of `buffers.set_capture_batch_sizes`."""

    @property
    def capture_bs(cls) -> list[int]:
        return buffers.get_capture_batch_sizes()

    @capture_bs.setter
    def capture_bs(cls, sizes: Iterable[int]) -> None:
        buffers.set_capture_batch_sizes(sizes)


class KExpertsCPUBuffer(metaclass=_AnnouncedSizes):
    """Buffers of a batch, with the name and shape of the public interface.

    The wrappers do not use them: they have their own, private buffers, so no result of a wrapper is
    ever found here.

    Attributes:
        capture_bs: the sizes given to ``set_capture_batch_sizes``; assigning to it sets them.
        buffer_depth: tensors in each list of ``get_buffer``.
        capture_buffers: buffers of the announced batch sizes, by everything that shapes them.
        temp_bs, temp_buffer: the batch size and buffers of the latest other call.
    """

    buffer_depth: ClassVar[int] = 2
    capture_buffers: ClassVar[dict[Hashable, Buffers]] = {}
    temp_bs: ClassVar[int] = 0
    temp_buffer: ClassVar[Buffers] = ()
    _temp_key: ClassVar[Hashable] = None

    @classmethod
    def get_buffer(cls, hidden_states: torch.Tensor, num_experts_per_tok: int) -> Buffers:
        """The buffers for a batch: the same ones for the same sizes, dtype and device.

        Buffers of announced batch sizes are kept until ``clear_buffer_cache``; of the others, only
        the latest ones.

        Args:
            hidden_states: [T, H]; only its shape, dtype and device are read.
            num_experts_per_tok: k.

        Returns:
            Lists of ``buffer_depth`` tensors each, on the CPU and pinned where there is a GPU:
            input [T, H] bf16; ids int64 [T, k], those to compute now and those deferred (filled
            with -1); router weights float32 [T, k]; output [T, H] bf16; T as int32 [1]; and on the
            device of ``hidden_states``, in its dtype, output [T, H].

        Raises:
            TypeError, ValueError: ``hidden_states`` is not a tensor [T, H].
        """
        need_tensor("hidden_states", hidden_states)
        need_dense("hidden_states", hidden_states)
        if hidden_states.dim() != 2:
            raise ValueError(f"hidden_states must be [T, H], got {list(hidden_states.shape)}")
        tokens, hidden = hidden_states.shape
        dtype, device = hidden_states.dtype, hidden_states.device
        key = tokens, hidden, num_experts_per_tok, dtype, device
        if key in cls.capture_buffers:
            return cls.capture_buffers[key]
        if key == cls._temp_key:
            return cls.temp_buffer
        with torch.inference_mode(False):  # writable outside of inference mode, too
            made = cls._make(tokens, hidden, num_experts_per_tok, dtype, device)
        if tokens in cls.capture_bs:
            cls.capture_buffers[key] = made
        else:
            cls._temp_key, cls.temp_bs, cls.temp_buffer = key, tokens, made
        return made

    @classmethod
    def clear(cls) -> int:
        """Drops all buffers; returns their bytes. Buffers that a caller holds stay valid."""
        kept = [*cls.capture_buffers.values(), cls.temp_buffer]
        cls.capture_buffers.clear()
        cls._temp_key, cls.temp_bs, cls.temp_buffer = None, 0, ()
        return sum(tensor.nbytes for lists in kept for tensors in lists for tensor in tensors)

    @classmethod
    def _make(
        cls, tokens: int, hidden: int, k: int, dtype: torch.dtype, device: torch.device
    ) -> Buffers:
        pinned = torch.cuda.is_available()

        def on_host(shape: tuple[int, ...], dtype: torch.dtype, value: int) -> list[torch.Tensor]:
            # Explicit device="cpu": engines run models under a device context.
            return [
                torch.full(shape, value, dtype=dtype, device="cpu", pin_memory=pinned)
                for _ in range(cls.buffer_depth)
            ]

        return (
            on_host((tokens, hidden), torch.bfloat16, 0),
            on_host((tokens, k), torch.int64, 0),
            on_host((tokens, k), torch.int64, -1),
            on_host((tokens, k), torch.float32, 0),
            on_host((tokens, hidden), torch.bfloat16, 0),
            on_host((1,), torch.int32, tokens),
            [
                torch.zeros((tokens, hidden), dtype=dtype, device=device)
                for _ in range(cls.buffer_depth)
            ],
        )
