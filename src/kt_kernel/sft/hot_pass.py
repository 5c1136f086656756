"""`HotPass`: how the GPU's part of a pass runs beside the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .base import BaseSFTMoEWrapper
from .batch import NonFiniteGradient, first_bad_row, on_host
from .buffers import KExpertsSFTBuffer

#: Returns the tensor that it is given; the gradient of that one is checked, under this name.
Watch = Callable[[str, torch.Tensor], torch.Tensor]


class HotPass:
    """One pass through the hot experts of a layer.

    Forward, the hot experts are computed while the CPU computes the others. Backward, autograd runs
    first what was created last: `join`, which starts to copy the gradient to the host; the hot
    experts; then the CPU's experts, which wait for that copy and not for the GPU's kernels. Nothing
    before that waits for the GPU, so gradients are checked at the end.

    Args:
        wrapper: the layer's other experts.
        experts: computes the hot ones, [T, H].
        checks: whether a gradient that is NaN or infinite is an error.
    """

    def __init__(
        self,
        wrapper: BaseSFTMoEWrapper,
        experts: Callable[[Watch], torch.Tensor],
        checks: bool,
    ) -> None:
        self._wrapper, self._experts, self._checks = wrapper, experts, checks
        self._out: torch.Tensor | None = None
        self._gradients: list[tuple[str, torch.Tensor]] = []
        self._copy: _Copy | None = None

    def compute(self, differentiable: bool) -> None:
        """Computes the experts, as a graph of its own where gradients are off."""
        with torch.set_grad_enabled(differentiable):
            self._out = self._experts(self._watch)

    def join(self, cold: torch.Tensor) -> torch.Tensor:
        """The sum of all experts, of what the CPU made of its own."""
        assert self._out is not None
        out, self._out = self._out, None
        joined: torch.Tensor = _Join.apply(self, cold, out)
        return joined

    def start_copy(self, gradient: torch.Tensor) -> None:
        """Begins to copy the gradient of the sum to the host."""
        if gradient.device.type != "cpu":
            self._copy = _Copy(self._wrapper, gradient)

    def gradient_on_host(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """The copy that `start_copy` began, bf16 [T, H]; None if there is none of this gradient."""
        return None if self._copy is None else self._copy.wait(gradient)

    def end_backward(self) -> None:
        """Lets go of what backward needed."""
        copy, self._copy = self._copy, None
        self._gradients.clear()
        if copy is not None:
            copy.release()

    def check_gradients(self) -> None:
        """Raises `NonFiniteGradient`, naming layer and place, if a gradient of the hot experts is
        NaN or infinite."""
        for name, gradient in self._gradients:
            bad = first_bad_row(gradient)
            if bad is None:
                continue
            where, mask = self._wrapper._settings.where, self._wrapper.gpu_experts_mask
            slot = int(mask.nonzero().flatten()[bad]) if name != "grad_input" else bad
            raise NonFiniteGradient(
                f"{where}: {name} of the experts on the GPU has a NaN or infinite value in "
                f"{'token' if name == 'grad_input' else 'slot'} {slot}; the loss, a later layer, "
                "an input or a weight made it"
            )

    def _watch(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not (self._checks and tensor.requires_grad):
            return tensor
        view = tensor.view_as(tensor)
        view.register_hook(lambda gradient: self._gradients.append((name, gradient)))
        return view


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hot: HotPass, cold: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        ctx.hot = hot
        return cold + out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, torch.Tensor]:
        ctx.hot.start_copy(gradient)
        return None, gradient, gradient


class _Copy:
    """A gradient on its way to the host."""

    def __init__(self, wrapper: BaseSFTMoEWrapper, gradient: torch.Tensor) -> None:
        rows = gradient.reshape(-1, gradient.shape[-1])
        self._address = gradient.data_ptr()
        self._buffer: KExpertsSFTBuffer = wrapper._take_buffer(len(rows))
        room = self._buffer.grad_output_cpu
        self._values = on_host(rows, tuple(rows.shape), torch.bfloat16, room)
        self._event = torch.cuda.Event() if gradient.device.type == "cuda" else None
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(gradient.device))

    def wait(self, gradient: torch.Tensor) -> torch.Tensor | None:
        if gradient.data_ptr() != self._address:
            return None
        if self._event is not None:
            self._event.synchronize()
        return self._values

    def release(self) -> None:
        self._buffer.release()
