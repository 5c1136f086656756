"""A fine-tuning wrapper as a differentiable function.

The activations of a forward pass are kept by the wrapper, newest first. What is kept for autograd
is a ticket: a tensor among the saved ones, whose memory tells when the pass is no longer needed,
whoever holds it and whatever becomes of the graph:

- Checkpointing without reentry lets go of all saved tensors of its first pass, so the ticket dies
  and the pass is dropped; backward gets the ticket of the pass that was computed again.
- A pass that is not the newest, was not kept for want of room, or was kept by a copy of its ticket
  (``torch.autograd.graph.save_on_cpu``), is computed again in backward, with the same dropout mask.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from ..moe.weight_checks import PARAMETERS
from ..weights.expert_tensors import MATRICES
from .base import BaseSFTMoEWrapper, Saved
from .batch import HostBatch, check_batch
from .hot_pass import HotPass
from .lora import LORA_NAMES


def lora_experts(
    wrapper: BaseSFTMoEWrapper,
    hidden_states: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    lora: Sequence[torch.Tensor],
    training: bool,
    nonfinite: str = "error",
    base: Sequence[torch.Tensor] = (),
    hot: HotPass | None = None,
) -> torch.Tensor:
    """The experts' weighted sum [T, H], differentiable in hidden states, router weights, LoRA and,
    where they are given, base weights.

    Args:
        hidden_states: [T, H], float. expert_ids: [T, k], integer. weights: [T, k], float.
        lora: the six LoRA tensors that the wrapper has, in their order.
        training: whether dropout is on.
        nonfinite: see `LoraExperts`.
        base: gate_proj and up_proj [E, I, H] and down_proj [E, H, I], of which the wrapper, made
            with ``full_weight_grad``, has packed copies; or nothing.
        hot: computes the experts that the wrapper leaves out, while the CPU computes the others.

    Returns:
        [T, H] in the dtype and on the device of ``hidden_states``.

    Raises:
        RuntimeError, TypeError, ValueError: what ``forward_sft`` raises; in backward, what
            ``backward`` raises.
    """
    differentiable = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (hidden_states, weights, *lora, *base)
    )
    given = hidden_states, expert_ids, weights
    if differentiable:
        out = _LoraExperts.apply(wrapper, training, nonfinite, hot, *given, *lora, *base)
    else:
        meanwhile = None if hot is None else functools.partial(hot.compute, False)
        out = _forward(wrapper, *given, False, training, meanwhile)[0].to(hidden_states.dtype)
    return out if hot is None else hot.join(out)


class _LoraExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        wrapper: BaseSFTMoEWrapper,
        training: bool,
        nonfinite: str,
        hot: HotPass | None,
        hidden_states: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        *trained: torch.Tensor,
    ) -> torch.Tensor:
        lora, base = trained[: len(LORA_NAMES)], trained[len(LORA_NAMES) :]
        given = hidden_states, expert_ids, weights
        meanwhile = None if hot is None else functools.partial(hot.compute, True)
        out, saved, seed = _forward(wrapper, *given, True, training, meanwhile)
        ctx.hot = hot
        ctx.wrapper, ctx.training, ctx.nonfinite = wrapper, training, nonfinite
        ctx.lora, ctx.mark = lora, wrapper.mark_of(lora)
        ctx.base = [(tensor.device, tensor.dtype) for tensor in base]
        ctx.save_for_backward(
            hidden_states, expert_ids, weights, _ticket(wrapper, saved, seed), *lora
        )
        return out.to(hidden_states.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hot: HotPass | None = ctx.hot
        if hot is None:
            return _LoraExperts._backward(ctx, grad_output)
        try:
            return _LoraExperts._backward(ctx, grad_output)
        finally:
            hot.end_backward()

    @staticmethod
    def _backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_states, expert_ids, weights, ticket, *lora = ctx.saved_tensors
        wrapper: BaseSFTMoEWrapper = ctx.wrapper
        number, seed = ticket.tolist()
        with wrapper._exclusive("backward"):
            wrapper._need_idle("backward")
            tokens = check_batch(wrapper._settings, hidden_states, expert_ids, weights)
            if wrapper.mark_of(ctx.lora) != ctx.mark:
                raise RuntimeError(
                    f"layer {wrapper.layer_idx}: the LoRA or base weights changed between a "
                    "forward pass and its backward; call backward before optimizer.step() and "
                    "update_lora_weights()"
                )
            # A pass with the adapter switched off may have come between.
            wrapper.hold_lora(ctx.lora)
            again = None
            if not wrapper._saved or wrapper._saved[-1].number != number:
                again = _compute_again(ctx, hidden_states, expert_ids, weights, tokens, seed)
            try:
                staged = None if ctx.hot is None else ctx.hot.gradient_on_host(grad_output)
                x, grads, routes = wrapper.compute_gradients(
                    grad_output, tokens, ctx.nonfinite, staged
                )
            except BaseException:
                if again in wrapper._saved:
                    wrapper.drop_newest()
                raise
        if ctx.hot is not None:
            ctx.hot.add_gradients(grads)
        need_x, _, need_routes, *needs = ctx.needs_input_grad[4:]
        names = [f"grad_{name}" for name in LORA_NAMES]
        kinds = [(tensor.device, tensor.dtype) for tensor in lora]
        if ctx.base:
            names += [f"grad_{PARAMETERS[matrix]}" for matrix in MATRICES]
        return (
            None,
            None,
            None,
            None,
            x.to(hidden_states).view_as(hidden_states) if need_x else None,
            None,
            routes.to(weights) if need_routes else None,
            *(
                grads[name].to(*kind) if needed else None
                for name, kind, needed in zip(names, kinds + ctx.base, needs, strict=True)
            ),
        )


def _compute_again(
    ctx: Any,
    hidden_states: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    tokens: int,
    seed: int,
) -> Saved | None:
    """Makes a pass the newest saved one."""
    wrapper: BaseSFTMoEWrapper = ctx.wrapper
    batch = _host_batch(wrapper, hidden_states, expert_ids, weights, tokens)
    try:
        return wrapper.compute(batch, True, seed, drop=ctx.training)
    finally:
        batch.release()


def _ticket(wrapper: BaseSFTMoEWrapper, saved: Saved | None, seed: int) -> torch.Tensor:
    """A tensor that says which pass is meant, 0 for one that was not kept, and its seed. When the
    last tensor on its memory is gone, the pass is given up."""
    memory = np.array([0 if saved is None else saved.number, seed], dtype=np.int64)
    if saved is not None:
        weakref.finalize(memory, wrapper.give_up, saved).atexit = False
    return torch.from_numpy(memory)


def _forward(
    wrapper: BaseSFTMoEWrapper,
    hidden_states: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    keep: bool,
    training: bool,
    meanwhile: Callable[[], None] | None,
) -> tuple[torch.Tensor, Saved | None, int]:
    """The sum on the device of the hidden states, what was kept if ``keep``, and the seed. Calls
    ``meanwhile`` while the experts are being computed.

    Dropout is on in training, whether or not the pass is kept: the first pass of reentrant
    checkpointing must drop what the second one does.
    """
    with wrapper._exclusive("forward"):
        tokens = wrapper._check_forward("forward", hidden_states, expert_ids, weights)
        seed = wrapper.draw_seed(training)
        keep = keep and wrapper.has_room
        batch = _host_batch(wrapper, hidden_states, expert_ids, weights, tokens)
        try:
            saved = wrapper.compute(batch, keep, seed, meanwhile, drop=training)
            return wrapper.deliver(batch, hidden_states.device, saved), saved, seed
        finally:
            batch.release()


def _host_batch(
    wrapper: BaseSFTMoEWrapper,
    hidden_states: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    tokens: int,
) -> HostBatch:
    staged = hidden_states.device.type != "cpu"
    return wrapper._host_batch(hidden_states, expert_ids, weights, tokens, staged)
