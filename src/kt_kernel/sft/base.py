"""The fine-tuning interface: one object per MoE layer, its experts and their LoRA on the CPU."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..moe.buffers import Call
from ..moe.settings import LayerSettings
from ..moe.weight_checks import PARAMETERS
from ..moe.wrong_mode import refuse_calls
from ..weights.expert_tensors import MATRICES, matrix_shapes
from .batch import (
    HostBatch,
    NonFiniteGradient,
    bf16_array,
    check_batch,
    check_device,
    check_hidden,
    first_bad_row,
    on_host,
    wait_for_copies,
)
from .buffers import KExpertsSFTBuffer
from .lora import GRAD_NAMES, LORA_NAMES
from .settings import SftSettings, need_bool
from .weights import LoraWeights

__all__ = ["BaseSFTMoEWrapper", "KExpertsSFTBuffer"]

Gradients = tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]


_numbers = itertools.count(1)


@dataclass(eq=False, slots=True)
class Saved:
    """A forward pass whose activations wait for backward.

    tokens: T. updates: how often the LoRA weights had been read. unused: its backward never comes.
    number: of no other pass in this process.
    """

    tokens: int
    updates: int
    unused: bool = False
    number: int = field(default_factory=lambda: next(_numbers))


@dataclass(eq=False, slots=True)
class _Submitted:
    batch: HostBatch
    call: Call | None  # None: of no tokens
    saved: Saved | None


class BaseSFTMoEWrapper(LoraWeights):
    """One MoE layer for fine-tuning. Made by ``KTMoEWrapper(mode="sft")``.

    Every projection computes ``x Wᵀ + (alpha / R) * dropout(x) Aᵀ Bᵀ``. LoRA tensors and their
    gradients are in logical order: A [E, R, in], B [E, out, R].

    Use a wrapper from one thread at a time; a call while another thread is in one raises
    RuntimeError.

    A forked child inherits the passes that wait for their backward, except one that was submitted
    and not synced. If another thread of the parent was in a call, the child has no passes.
    """

    def __init__(self, settings: LayerSettings, sft: SftSettings) -> None:
        super().__init__(settings, sft)
        self._saved: list[Saved] = []
        self._given_up: deque[Saved] = deque()  # appended to from any thread, at any time
        self._submitted: _Submitted | None = None

    # ---- what it is -------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Forward passes that wait for their backward."""
        return len(self._saved)

    # ---- steps ------------------------------------------------------------------------------

    def forward_sft(
        self,
        hidden_states: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        save_for_backward: bool = True,
        output_device: torch.device | str | None = None,
    ) -> torch.Tensor:
        """Computes the layer's experts and waits for them.

        Args:
            hidden_states: [T, H], any float dtype, any device; rounded to bf16.
            expert_ids: [T, k] slots, any integer dtype; ids outside 0 … E-1 and slots on the GPU
                are skipped.
            weights: [T, k] router weights, any float dtype.
            save_for_backward: False keeps nothing for ``backward``, and dropout is off.
            output_device: of the result; None for the CPU.

        Returns:
            bf16 [T, H], a fresh tensor.

        Raises:
            RuntimeError: before loading or ``init_lora_weights``; the LoRA tensors changed without
                ``update_lora_weights``; ``max_cache_depth`` passes wait for their backward;
                ``sync_forward_sft`` is missing. Nothing was computed then, nothing is lost.
            TypeError, ValueError: wrong types, shapes or dtypes, or too many tokens.
        """
        need_bool(f"{self._settings.where}: save_for_backward", save_for_backward)
        device = check_device(f"{self._settings.where}: output_device", output_device)
        with self._exclusive("forward_sft"):
            tokens = self._check_forward("forward_sft", hidden_states, expert_ids, weights)
            self._need_room("forward_sft", save_for_backward)
            given = hidden_states, expert_ids, weights
            staged = any(tensor.device.type != "cpu" for tensor in given)
            batch = self._host_batch(*given, tokens, staged)
            try:
                seed = self.draw_seed(save_for_backward)
                return self.deliver(batch, device, self.compute(batch, save_for_backward, seed))
            finally:
                batch.release()

    def submit_forward_sft(
        self,
        hidden_states: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        save_for_backward: bool = True,
    ) -> None:
        """Starts what ``forward_sft`` does and returns once the inputs are on the host.

        They are copied. Raises what ``forward_sft`` raises; RuntimeError also for a second submit
        before ``sync_forward_sft``.
        """
        need_bool(f"{self._settings.where}: save_for_backward", save_for_backward)
        with self._exclusive("submit_forward_sft"):
            tokens = self._check_forward("submit_forward_sft", hidden_states, expert_ids, weights)
            self._need_room("submit_forward_sft", save_for_backward)
            batch = self._host_batch(hidden_states, expert_ids, weights, tokens, True)
            call = None
            if tokens:
                # After an exception the buffer is not released: the pass may be under way.
                call = self._start(batch, save_for_backward, self.draw_seed(save_for_backward))
            saved = self._keep(tokens) if save_for_backward else None
            self._submitted = _Submitted(batch, call, saved)

    def sync_forward_sft(self, output_device: torch.device | str | None = None) -> torch.Tensor:
        """Waits for ``submit_forward_sft`` and returns its result, as ``forward_sft`` does.

        Raises:
            RuntimeError: without ``submit_forward_sft``, or the process forked after it, and the
                pass is dropped; or a device that is not there.
            TypeError: ``output_device`` is not a device. The pass is kept; call it again.
        """
        device = check_device(f"{self._settings.where}: output_device", output_device)
        with self._exclusive("sync_forward_sft"):
            submitted, self._submitted = self._submitted, None
            if submitted is None:
                raise RuntimeError(
                    f"{self._settings.where}: sync_forward_sft without submit_forward_sft"
                )
            try:
                if submitted.call is not None:
                    submitted.call.wait()
            except BaseException:
                if submitted.saved is not None:
                    self.drop_newest()
                raise
            try:
                return self.deliver(submitted.batch, device, submitted.saved)
            finally:
                submitted.batch.release()

    def backward(
        self,
        grad_output: torch.Tensor,
        lora_params: Mapping[str, Any] | None = None,
        output_device: torch.device | str | None = None,
    ) -> Gradients:
        """The gradients of the newest forward pass that waits for them.

        Args:
            grad_output: [T, H], any float dtype, any device; rounded to bf16.
            lora_params: only its keys are checked; the gradients are those of the tensors that
                ``init_lora_weights`` was given.
            output_device: of the gradients with respect to the inputs; None for the CPU.

        Returns:
            grad_input bf16 [T, H]; the six LoRA gradients by the names ``grad_gate_lora_a`` …
            ``grad_down_lora_b``, in the dtype and on the device of their tensors, zeros for a
            method with suffix ``_SkipLoRA``; and the gradient of the router weights, float32
            [T, k]. With ``full_weight_grad`` the dictionary also has ``grad_gate_proj``,
            ``grad_up_proj`` [E, I, H] and ``grad_down_proj`` [E, H, I], float32. All are fresh
            tensors.

        Raises:
            RuntimeError: no forward pass waits; the LoRA weights were updated after it; or a
                gradient is NaN or infinite, which is a FloatingPointError, too.
            TypeError, ValueError: a wrong type, shape, dtype or key. Nothing is lost then.
        """
        where = self._settings.where
        device = check_device(f"{where}: output_device", output_device)
        with self._exclusive("backward"):
            self._need_idle("backward")
            if not self._saved:
                raise RuntimeError(
                    f"{where}: backward without a forward pass; call forward_sft with "
                    "save_for_backward=True first"
                )
            newest = self._saved[-1]
            tokens = check_hidden(self._settings, "grad_output", grad_output)
            if tokens != newest.tokens:
                raise ValueError(
                    f"{where}: grad_output must be [{newest.tokens}, {self.hidden_size}] for the "
                    f"newest forward pass, got {list(grad_output.shape)}"
                )
            if lora_params is not None and not isinstance(lora_params, Mapping):
                raise TypeError(
                    f"{where}: lora_params must be a mapping with the keys "
                    f"{', '.join(LORA_NAMES)}, got {type(lora_params).__name__}"
                )
            if lora_params is not None and set(lora_params) != set(LORA_NAMES):
                raise ValueError(
                    f"{where}: lora_params has the keys {sorted(map(str, lora_params))}; accepted: "
                    f"{', '.join(LORA_NAMES)}"
                )
            if newest.updates != self._updates:
                raise RuntimeError(
                    f"{where}: the LoRA weights were updated between a forward pass and its "
                    "backward; call backward before update_lora_weights, or clear_pending to drop "
                    "the pass"
                )
            if device is None:
                return self.compute_gradients(grad_output, tokens)
            # Room first: without it the gradients would be lost.
            hidden, routes = (tokens, self.hidden_size), (tokens, self.num_experts_per_tok)
            x_there = torch.empty(hidden, dtype=torch.bfloat16, device=device)
            weights_there = torch.empty(routes, dtype=torch.float32, device=device)
            x, lora, weights = self.compute_gradients(grad_output, tokens)
            return x_there.copy_(x), lora, weights_there.copy_(weights)

    def clear_pending(self) -> None:
        """Drops all forward passes that wait for their backward, and frees the memory that passes
        of all layers left for the next ones.

        Raises:
            RuntimeError: between ``submit_forward_sft`` and ``sync_forward_sft``.
        """
        with self._exclusive("clear_pending"):
            self._need_idle("clear_pending")
            if self._sft_core is not None:
                self._sft_core.clear()
            self._saved.clear()

    # ---- for kt_kernel.sft.autograd, inside `_exclusive` ------------------------------------

    def compute(
        self,
        batch: HostBatch,
        save: bool,
        seed: int,
        meanwhile: Callable[[], None] | None = None,
        drop: bool | None = None,
    ) -> Saved | None:
        """Fills ``batch.out``; returns what was saved. Calls ``meanwhile`` while the experts are
        being computed. drop: whether dropout is on; None: if the pass is saved."""
        if meanwhile is None:
            if len(batch.x):
                self._sft_core.forward(*batch.arrays, save=save, seed=seed, drop=drop)
            return self._keep(len(batch.x)) if save else None
        call = self._start(batch, save, seed, drop) if len(batch.x) else None
        try:
            meanwhile()
        finally:
            if call is not None:
                call.wait()
        return self._keep(len(batch.x)) if save else None

    def deliver(
        self, batch: HostBatch, device: torch.device | str | None, saved: Saved | None
    ) -> torch.Tensor:
        """The result of the newest pass on ``device``. Without such a device, or room on it, the
        pass is dropped: nobody can ask for its backward."""
        try:
            return batch.result(device)
        except BaseException:
            if saved is not None:
                self.drop_newest()
            raise

    def compute_gradients(
        self,
        grad_output: torch.Tensor,
        tokens: int,
        nonfinite: str = "error",
        staged: torch.Tensor | None = None,
    ) -> Gradients:
        """The gradients of the newest saved pass, which is taken away.

        nonfinite: "error" raises RuntimeError for a NaN or an infinity; "propagate" makes all
        gradients NaN where ``grad_output`` has one.
        staged: a copy of ``grad_output`` on the host, bf16 [T, H].
        """
        s = self._settings
        hidden, routes = (tokens, s.hidden_size), (tokens, s.num_experts_per_tok)
        grad_input = torch.empty(hidden, dtype=torch.bfloat16, device="cpu")
        grad_weights = torch.empty(routes, dtype=torch.float32, device="cpu")
        grads = self._gradient_room(zeros=not tokens)
        finite = True
        if tokens:
            copies = staged is None and grad_output.device.type != "cpu"
            staging = self._take_buffer(tokens) if copies else None
            try:
                if staged is None:
                    room = None if staging is None else staging.grad_output_cpu
                    staged = on_host(grad_output, hidden, torch.bfloat16, room)
                    wait_for_copies(grad_output.device)
                finite = self._run_backward(staged, grad_input, grad_weights, grads, nonfinite)
            except BaseException:
                self._agree()
                raise
            finally:
                if staging is not None:
                    staging.release()
        self._saved.pop()
        if nonfinite == "error" and not finite:
            why = "an input of the forward pass or a weight made it"
            self._need_finite("grad_input", grad_input, "token", why)
            self._need_finite("grad_weights", grad_weights, "token", why)
            for name, grad in (grads or {}).items():
                self._need_finite(name, grad, "slot", why)
        result = {}
        for name, grad in (grads or {}).items():
            of = name.removeprefix("grad_")
            like = self._lora.get(of)
            dtype = grad.dtype if like is None else like.dtype
            result[name] = self._order.to_logical(of, grad, dtype)
            if like is not None:
                result[name] = result[name].to(like.device)
        if self._sft.method.skip_lora_grads:
            result = {
                f"grad_{name}": torch.zeros_like(tensor, memory_format=torch.contiguous_format)
                for name, tensor in self._lora.items()
            } | result
        return grad_input, result, grad_weights

    def draw_seed(self, drop: bool) -> int:
        """Of the dropout mask, from torch's CPU generator; 0 where nothing is dropped."""
        if not (drop and self._sft.lora_dropout):
            return 0
        return int(torch.randint(2**62, (), device="cpu"))

    def drop_newest(self) -> None:
        """Drops the newest saved pass."""
        if self._saved.pop().tokens:
            self._sft_core.drop_newest()

    def give_up(self, saved: Saved) -> None:
        """Says that the backward of a pass never comes. Any thread may call it, also while another
        one is in a call."""
        self._given_up.append(saved)
        if self._enter():
            self._leave()

    # ---- how --------------------------------------------------------------------------------

    def _start(self, batch: HostBatch, save: bool, seed: int, drop: bool | None = None) -> Call:
        call = Call(self._sft_core, batch)
        submit = functools.partial(self._sft_core.submit_forward, save=save, seed=seed, drop=drop)
        call.start(submit, *batch.arrays)
        return call

    def _between_calls(self) -> None:
        """Drops the newest passes as far as their backward never comes. An older one waits for
        those above it, since the compiled core drops the newest only."""
        while self._given_up:
            self._given_up.popleft().unused = True
        if self._submitted is None:
            self._agree()
            while self._saved and self._saved[-1].unused:
                self.drop_newest()

    def _agree(self) -> None:
        """Drops the newest passes that only the compiled core has, or only this object. They remain
        where an exception such as KeyboardInterrupt ended a call between the two."""
        if self._sft_core is None:
            return
        surplus = self._sft_core.pending - sum(saved.tokens > 0 for saved in self._saved)
        for _ in range(surplus):
            self._sft_core.drop_newest()
        for _ in range(-surplus):
            while not self._saved.pop().tokens:
                pass

    def _forget_call(self) -> None:
        self._saved.clear()
        self._given_up.clear()
        self._submitted = None
        if self._sft_core is not None:
            self._sft_core.clear()
        super()._forget_call()

    def _check_forward(self, call: str, *given: Any) -> int:
        """Raises what ``forward_sft`` raises; returns T."""
        self._need_weights(call)
        if self.lora_changed:
            raise RuntimeError(
                f"{self._settings.where}: the LoRA tensors changed since they were last read; call "
                f"update_lora_weights after optimizer.step() and before {call}"
            )
        return check_batch(self._settings, *given)

    def _need_idle(self, call: str) -> None:
        if self._submitted is not None:
            raise RuntimeError(
                f"{self._settings.where}: {call} after submit_forward_sft; call sync_forward_sft "
                "first"
            )

    def _need_room(self, call: str, save: bool) -> None:
        if save and not self.has_room:
            raise RuntimeError(
                f"{self._settings.where}: {len(self._saved)} forward passes wait for their "
                f"backward and max_cache_depth={self._sft.max_cache_depth}; call backward before "
                f"{call}, or construct the wrapper with a larger max_cache_depth"
            )

    @property
    def has_room(self) -> bool:
        """Whether one more forward pass may wait for its backward."""
        return len(self._saved) < self._sft.max_cache_depth

    def _run_backward(
        self,
        grad: torch.Tensor,
        grad_input: torch.Tensor,
        grad_weights: torch.Tensor,
        grads: dict[str, torch.Tensor] | None,
        nonfinite: str,
    ) -> bool:
        """Fills the gradients of the newest pass, which the compiled core then drops; returns
        whether they are finite."""
        try:
            finite: bool = self._sft_core.backward(
                bf16_array(grad),
                bf16_array(grad_input),
                grad_weights.numpy(),
                None if grads is None else [gradient.numpy() for gradient in grads.values()],
            )
        except ValueError:
            if self._finite(grad):
                raise
            if nonfinite == "error":
                why = "the loss or a later layer made it"
                self._need_finite("grad_output", grad, "token", why)
            for gradient in (grad_input, grad_weights, *(grads or {}).values()):
                gradient.fill_(torch.nan)
            self._sft_core.drop_newest()
            return False
        return finite

    def _finite(self, gradient: torch.Tensor) -> bool:
        """Whether no value is NaN or infinite. ``gradient``: bf16 or float32, contiguous, on the
        CPU."""
        if self._sft_core is None:
            return first_bad_row(gradient) is None
        bits = bf16_array(gradient) if gradient.dtype == torch.bfloat16 else gradient.numpy()
        # By the layer's threads: torch's would have to wake up, and would then spin beside them.
        return self._sft_core.all_finite(bits)

    def _need_finite(self, name: str, gradient: torch.Tensor, part: str, why: str) -> None:
        """``gradient``: as for `_finite`."""
        if self._finite(gradient):
            return
        bad = first_bad_row(gradient)
        if bad is not None:
            raise NonFiniteGradient(
                f"{self._settings.where}: {name} has a NaN or infinite value in {part} {bad}; {why}"
            )

    def _keep(self, tokens: int) -> Saved:
        saved = Saved(tokens, self._updates)
        self._saved.append(saved)
        return saved

    def _take_buffer(self, tokens: int) -> KExpertsSFTBuffer:
        s = self._settings
        return KExpertsSFTBuffer.take(
            tokens,
            s.hidden_size,
            s.moe_intermediate_size,
            s.num_experts,
            s.num_experts_per_tok,
            self._sft.lora_rank,
        )

    def _host_batch(
        self,
        hidden_states: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
        tokens: int,
        staged: bool,
    ) -> HostBatch:
        buffer = self._take_buffer(tokens) if staged else None
        return HostBatch(
            hidden_states, expert_ids, weights, tokens, self._settings.hidden_size, buffer
        )

    def _gradient_room(self, zeros: bool) -> dict[str, torch.Tensor] | None:
        """float32 arrays in slot order, which backward fills; None where it computes none."""
        shapes = {}
        if not self._sft.method.skip_lora_grads:
            shapes = {name: self._shapes[name.removeprefix("grad_")] for name in GRAD_NAMES}
        if self._sft.full_weight_grad:
            s = self._settings
            whole = matrix_shapes(s.hidden_size, s.moe_intermediate_size)
            shapes |= {f"grad_{PARAMETERS[m]}": (s.num_experts, *whole[m]) for m in MATRICES}
        make = torch.zeros if zeros else torch.empty
        room = {n: make(shape, dtype=torch.float32, device="cpu") for n, shape in shapes.items()}
        return room or None


refuse_calls(
    BaseSFTMoEWrapper,
    "inference",
    {
        "forward": "call forward_sft",
        "submit_forward": "call submit_forward_sft",
        "sync_forward": "call sync_forward_sft",
        "select_deferred_experts": "fine-tuning defers no experts",
    },
)
