"""`HotPass`: how the GPU's part of a pass runs beside the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .base import BaseSFTMoEWrapper
from .batch import NonFiniteGradient, first_bad_row, on_host
from .buffers import KExpertsSFTBuffer
from .hot import HotExperts
from .lora import GRAD_NAMES


class HotPass:
    """One pass through the hot experts of a layer.

    Forward, the hot experts are computed while the CPU computes the others. Backward, autograd runs
    first what was created last: `join`, which starts to copy the gradient to the host; the hot
    experts; then the CPU's experts, which wait for that copy and not for the GPU's kernels.

    Nothing before that waits for the GPU: the LoRA gradients of the hot experts go to the host
    while the CPU computes. At the end, `add_gradients` checks them and adds them to those of all
    experts.

    Args:
        wrapper: the layer's other experts.
        hot: the hot ones.
        hidden_states, expert_ids, weights: [T, H], [T, k] and [T, k].
        lora: the six LoRA tensors of all experts.
        checks: whether a gradient that is NaN or infinite is an error.
    """

    def __init__(
        self,
        wrapper: BaseSFTMoEWrapper,
        hot: HotExperts,
        hidden_states: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        lora: Sequence[torch.Tensor],
        checks: bool,
    ) -> None:
        self.hot = hot
        self._wrapper, self._checks = wrapper, checks
        self._given: tuple[torch.Tensor, ...] = hidden_states, expert_ids, weights
        self._lora = lora
        self._out: torch.Tensor | None = None
        self._grad_input: torch.Tensor | None = None
        # On the host, once `_arrived` has happened.
        self._grad_lora: Sequence[torch.Tensor | None] = ()
        self._arrived: torch.cuda.Event | None = None
        self._added = False
        self._copy: _Copy | None = None

    def compute(self, differentiable: bool) -> None:
        """Computes the experts, as a graph of its own where gradients are off. Can be called once:
        afterwards only the graph holds the batch, so that checkpointing can free it."""
        (hidden_states, *routes), self._given = self._given, ()
        with torch.set_grad_enabled(differentiable):
            if self._checks and differentiable and hidden_states.requires_grad:
                hidden_states = hidden_states.view_as(hidden_states)
                hidden_states.register_hook(self._keep_grad_input)
            self._out = self.hot(hidden_states, *routes, _OfHot.apply(self, *self._lora))

    def join(self, cold: torch.Tensor) -> torch.Tensor:
        """Adds the sum of the hot experts to ``cold``, the sum of the CPU's."""
        assert self._out is not None
        out, self._out = self._out, None
        joined: torch.Tensor = _Join.apply(self, cold, out)
        return joined

    def start_copy(self, gradient: torch.Tensor) -> None:
        """Begins to copy the gradient of the sum to the host. Backward starts with it."""
        self._added = False
        if gradient.device.type != "cpu":
            self._copy = _Copy(self._wrapper, gradient)

    def gradient_on_host(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """The copy that `start_copy` began, bf16 [T, H]; None if there is none of this gradient."""
        return None if self._copy is None else self._copy.wait(gradient)

    def keep_lora_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Takes the LoRA gradients of the hot experts, until `add_gradients`. Raises RuntimeError
        if that was called already: they would be lost."""
        if self._added:
            raise RuntimeError("autograd ran the experts on the GPU after those on the CPU")
        self._grad_lora = [None if g is None else _to_host(g) for g in gradients]
        self._arrived = _recorded(self.hot.gate_proj.device)

    def add_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        """Adds the LoRA gradients of the hot experts to those of all experts, by `GRAD_NAMES`.

        Raises `NonFiniteGradient`, naming layer and place, if a gradient of the hot experts is NaN
        or infinite.
        """
        self._added = True
        if self._checks and self._grad_input is not None:
            self._need_finite("grad_input", self._grad_input)
        if self._arrived is not None:
            self._arrived.synchronize()
        for name, gradient in zip(GRAD_NAMES, self._grad_lora, strict=False):
            if gradient is None:
                continue
            if self._checks:
                self._need_finite(name, gradient)
            for slot, one in zip(self.hot.slots, gradient, strict=True):
                gradients[name][slot] += one

    def end_backward(self) -> None:
        """Lets go of what backward needed."""
        copy, self._copy = self._copy, None
        self._grad_input, self._grad_lora, self._arrived = None, (), None
        if copy is not None:
            copy.release()

    def _keep_grad_input(self, gradient: torch.Tensor) -> None:
        self._grad_input = gradient

    def _need_finite(self, name: str, gradient: torch.Tensor) -> None:
        known = gradient.dtype in (torch.bfloat16, torch.float32) and gradient.is_contiguous()
        if known and gradient.device.type == "cpu" and self._wrapper._finite(gradient):
            return
        bad = first_bad_row(gradient)
        if bad is None:
            return
        place = f"token {bad}" if name == "grad_input" else f"slot {self.hot.slots[bad]}"
        raise NonFiniteGradient(
            f"{self._wrapper._settings.where}: {name} of the experts on the GPU has a NaN or "
            f"infinite value in {place}; the loss, a later layer, an input or a weight made it"
        )


class _OfHot(torch.autograd.Function):
    """The hot experts' part of LoRA tensors, on their device. Its gradient is that of the whole
    only once `HotPass.add_gradients` has put it there."""

    @staticmethod
    def forward(ctx: Any, hot_pass: HotPass, *lora: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.hot_pass = hot_pass
        ctx.set_materialize_grads(False)
        return hot_pass.hot.of_hot(lora)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        ctx.hot_pass.keep_lora_gradients(gradients)
        return (None,) * (1 + len(gradients))


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hot: HotPass, cold: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ctx.hot = hot
        return cold + out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        ctx.hot.start_copy(gradient)
        return None, gradient, gradient


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the CPU, complete once an event that is recorded after this has happened."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return room.copy_(tensor, non_blocking=True)


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    """An event after all that the device's current stream has been given; None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class _Copy:
    """A gradient on its way to the host."""

    def __init__(self, wrapper: BaseSFTMoEWrapper, gradient: torch.Tensor) -> None:
        rows = gradient.reshape(-1, gradient.shape[-1])
        self._address = gradient.data_ptr()
        self._buffer: KExpertsSFTBuffer = wrapper._take_buffer(len(rows))
        room = self._buffer.grad_output_cpu
        self._values = on_host(rows, tuple(rows.shape), torch.bfloat16, room)
        self._event = _recorded(gradient.device)

    def wait(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if gradient.data_ptr() != self._address:
            return None
        if self._event is not None:
            self._event.synchronize()
        return self._values

    def release(self) -> None:
        self._buffer.release()
