"""The weights of a layer for fine-tuning: loading them, and the LoRA tensors beside them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ..moe.settings import LayerSettings
from ..moe.weight_checks import PARAMETERS
from ..moe.wrapper import BaseMoEWrapper
from ..runtime.forks import per_process
from ..runtime.tensors import need_tensor
from ..runtime.variant import native
from ..weights.expert_tensors import BIASES, MATRICES, Matrix
from ..weights.loading import Expert
from ..weights.quantised import column_order
from .batch import first_bad_row
from .lora import LORA_NAMES, SlotOrder, check_lora, lora_shapes
from .optimizer_steps import state_of
from .quantise import quantise_asymmetric
from .settings import SftSettings


class LoraWeights(BaseMoEWrapper):
    """The weights of one MoE layer: base weights and LoRA, the latter in logical order."""

    _in_use: threading.Lock

    def __init__(self, settings: LayerSettings, sft: SftSettings) -> None:
        super().__init__(settings)
        self._sft = sft
        self._sft_core: Any = None  # the compiled layer with LoRA, once the weights are loaded
        self._order = SlotOrder(range(settings.num_experts))
        self._lora: dict[str, torch.Tensor] = {}
        self._shapes = lora_shapes(
            settings.num_experts,
            sft.lora_rank,
            settings.hidden_size,
            settings.moe_intermediate_size,
        )
        self._read = state_of(())  # of the LoRA tensors when they were last read
        self._updates = 0  # how often they were read
        self._told = 0  # how often a caller said that their values changed
        self._base_updates = 0  # how often the base weights were packed again
        self._biases: dict[int, dict[str, torch.Tensor]] = {}  # by slot, for packing it again
        self._in_call = False  # stays True in a child that was forked during a call
        per_process(self, "_in_use", threading.Lock)

    @property
    def mode(self) -> str:
        return "sft"

    @property
    def method(self) -> str:
        """Name of the fine-tuning method."""
        return self._sft.method.name

    @property
    def lora_scaling(self) -> float:
        """alpha / R."""
        return self._sft.scaling

    @property
    def pending(self) -> int:
        """Forward passes that wait for their backward."""
        return 0

    def check_weights(
        self,
        gate_proj: torch.Tensor,
        up_proj: torch.Tensor,
        down_proj: torch.Tensor,
        **biases: torch.Tensor,
    ) -> None:
        """Raises what ``load_weights_from_tensors`` raises for a wrong type, shape or dtype, and
        ValueError for a weight that is not finite."""
        matrices = dict(zip(MATRICES, (gate_proj, up_proj, down_proj), strict=True))
        self._checks.layer(matrices | biases)
        self._need_finite_weights(matrices)

    def finish_loading(self) -> None:
        super().finish_loading()
        with self._load_lock:
            if self._sft_core is None:
                self._sft_core = self._make_sft_core()
                if len(self._lora) == len(LORA_NAMES):
                    self._read_lora()

    def update_base_weights(
        self, gate_proj: torch.Tensor, up_proj: torch.Tensor, down_proj: torch.Tensor
    ) -> None:
        """Packs other base weights, after a step with the gradients of ``full_weight_grad``. Biases
        stay as they were loaded.

        Args:
            gate_proj, up_proj: [E, I, H], down_proj: [E, H, I], logical order; bf16, fp16 or fp32.

        Raises:
            RuntimeError: before loading, while a forward pass waits for its backward, or between
                ``submit_forward_sft`` and ``sync_forward_sft``.
            TypeError, ValueError: as ``load_weights_from_tensors``; a weight that is not finite; a
                method that keeps the quantised weights of a checkpoint. Nothing was changed then.
        """
        where = self._settings.where
        with self._exclusive("update_base_weights"):
            if not self._loaded:
                raise RuntimeError(f"{where}: update_base_weights before load_weights")
            self._need_idle("update_base_weights")
            if self.pending:
                raise RuntimeError(
                    f"{where}: update_base_weights while {self.pending} forward passes wait for "
                    "their backward; call backward first, clear_pending to drop them, or run such "
                    "passes under torch.no_grad()"
                )
            if not self._settings.method.takes_dense:
                raise ValueError(
                    f"{where}: update_base_weights with method {self.method}, which keeps the "
                    "quantised weights of a checkpoint; accepted: methods that pack 16- or 32-bit "
                    "weights, such as AMXBF16_SFT"
                )
            given = dict(zip(MATRICES, (gate_proj, up_proj, down_proj), strict=True))
            for name, tensor in given.items():
                need_tensor(f"{where}: {PARAMETERS[name]}", tensor)
            form = self._checks.layer(given)
            if form != self._form:
                raise ValueError(f"{where}: the weights are {form}; loaded were {self._form}")
            self._need_finite_weights(given)
            mapping = self._order.mapping
            for slot in self._cpu_slots():
                expert = {name: tensor[mapping[slot]] for name, tensor in given.items()}
                self._pack(self._core, [(slot, expert | self._biases.get(slot, {}))])
            self._base_updates += 1

    def init_lora_weights(
        self,
        gate_lora_a: torch.Tensor,
        gate_lora_b: torch.Tensor,
        up_lora_a: torch.Tensor,
        up_lora_b: torch.Tensor,
        down_lora_a: torch.Tensor,
        down_lora_b: torch.Tensor,
    ) -> None:
        """The LoRA tensors: A [E, R, in], B [E, out, R], any float dtype and device.

        They are kept by reference and read again by ``update_lora_weights``. May be called before
        or after loading.

        Raises:
            RuntimeError: between ``submit_forward_sft`` and ``sync_forward_sft``.
            TypeError, ValueError: not tensors, a wrong shape or dtype, or (at the latest when the
                base weights are loaded) a value that is not finite. The wrapper then has the
                tensors that it had before.
        """
        given = (gate_lora_a, gate_lora_b, up_lora_a, up_lora_b, down_lora_a, down_lora_b)
        lora = dict(zip(LORA_NAMES, given, strict=True))
        for name, tensor in lora.items():
            check_lora(self._settings.where, name, tensor, self._shapes[name])
        with self._exclusive("init_lora_weights"):
            self._need_idle("init_lora_weights")
            self._take_lora(lora)

    def update_lora_weights(self) -> None:
        """Reads the LoRA tensors again, after an optimizer has changed them.

        Raises:
            RuntimeError: before loading or ``init_lora_weights``, or between
                ``submit_forward_sft`` and ``sync_forward_sft``.
            ValueError: a value is not finite.
        """
        with self._exclusive("update_lora_weights"):
            self._need_weights("update_lora_weights")
            self._told += 1
            self._read_lora()

    def holds_lora(self, lora: Sequence[torch.Tensor]) -> bool:
        """Whether these six are the tensors that `init_lora_weights` was given last."""
        return len(self._lora) == len(lora) and all(
            a is b for a, b in zip(self._lora.values(), lora, strict=True)
        )

    def hold_lora(self, lora: Sequence[torch.Tensor]) -> None:
        """Takes the tensors and reads them, unless it holds them; inside `_exclusive`."""
        if not self.holds_lora(lora):
            self._take_lora(dict(zip(LORA_NAMES, lora, strict=True)))

    def mark_of(self, lora: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Equal as long as the values of the tensors and the base weights are, whichever tensors
        the wrapper holds."""
        return self._told, self._base_updates, state_of(lora)

    @property
    def lora_changed(self) -> bool:
        """Whether a LoRA tensor was replaced, changed in place, or changed by an optimizer, since
        it was last read. Other changes through ``.data`` are not seen."""
        return self._read != state_of(self._lora.values())

    # ---- how --------------------------------------------------------------------------------

    @contextmanager
    def _exclusive(self, call: str) -> Iterator[None]:
        """RuntimeError where another thread is in a call."""
        if not self._enter():
            raise RuntimeError(
                f"{self._settings.where}: {call} while another call of this wrapper runs in "
                "another thread; use a wrapper from one thread at a time"
            )
        try:
            yield
        finally:
            self._leave()

    def _enter(self) -> bool:
        """Begins a call, unless another thread is in one."""
        if not self._in_use.acquire(blocking=False):
            return False
        try:
            if self._in_call:
                self._forget_call()
            self._in_call = True
            self._between_calls()
        except BaseException:
            self._in_use.release()
            raise
        return True

    def _leave(self) -> None:
        try:
            self._between_calls()
        finally:
            self._in_call = False
            self._in_use.release()

    def _between_calls(self) -> None:
        """Runs at the beginning and the end of each exclusive call."""

    def _forget_call(self) -> None:
        """Drops what a call may have left half done. The process forked while another thread was in
        the call, so the call never ends here."""
        complete = self._sft_core is not None and len(self._lora) == len(LORA_NAMES)
        if complete and not self.lora_changed:
            self._read_lora()  # the compiled core may have parts of two readings

    def _need_finite_weights(self, given: dict[str, torch.Tensor]) -> None:
        for name, tensor in given.items():
            bad = first_bad_row(tensor)
            if bad is not None:
                raise ValueError(
                    f"{self._settings.where}: {PARAMETERS[name]} has a NaN or infinite value in "
                    f"expert {bad}; accepted: finite weights"
                )

    def _need_idle(self, call: str) -> None:
        """Raises RuntimeError while a pass runs."""

    def _need_weights(self, call: str) -> None:
        where = self._settings.where
        if self._sft_core is None:
            raise RuntimeError(
                f"{where}: {call} before loading; call load_weights or load_weights_from_tensors "
                "first"
            )
        if len(self._lora) < len(LORA_NAMES):
            raise RuntimeError(f"{where}: {call} before init_lora_weights; call that first")
        self._need_idle(call)

    def _mapping(self, given: torch.Tensor) -> list[int]:
        mapping = super()._mapping(given)
        self._order = SlotOrder(mapping)
        return mapping

    def _make_sft_core(self) -> Any:
        sft = self._sft
        return native().SftLayer(
            self._core,
            rank=sft.lora_rank,
            scaling=sft.scaling,
            dropout=sft.lora_dropout,
            # One more than may wait: a pass that autograd computes again goes on top.
            max_cache_depth=sft.max_cache_depth + 1,
            skip_lora_grads=sft.method.skip_lora_grads,
            full_weight_grad=sft.full_weight_grad,
        )

    def _take_lora(self, lora: dict[str, torch.Tensor]) -> None:
        """Keeps other tensors, which are read if the base weights are loaded."""
        before, self._lora = self._lora, lora
        if self._sft_core is not None:
            try:
                self._read_lora()
            except BaseException:
                self._lora = before
                raise

    def _read_lora(self) -> None:
        state = state_of(self._lora.values())
        arrays = [self._order.to_slots(name, self._lora[name]).numpy() for name in LORA_NAMES]
        try:
            self._sft_core.update_lora(*arrays)
        except ValueError as error:
            raise ValueError(f"{self._settings.where}: {error}") from None
        self._read = state
        self._updates += 1

    def _pack(self, core: Any, experts: Sequence[tuple[int, Expert]]) -> None:
        super()._pack(core, experts)
        for slot, expert in experts:
            self._order.set_columns(slot, column_order(expert["down"]))
            if self._sft.full_weight_grad:
                biases = {name: expert[name] for name in BIASES if expert.get(name) is not None}
                self._biases[slot] = {name: bias.detach().clone() for name, bias in biases.items()}

    @property
    def _reads_as(self) -> str:
        return self._sft.method.reads_as

    def _packable(self, place: str, matrix: Matrix) -> Matrix:
        method = self._sft.method
        if not method.packs_zero_points or not isinstance(matrix, torch.Tensor):
            return matrix
        return quantise_asymmetric(matrix, method.base.group_size, method.per_row, place)


def _lora_attribute(name: str) -> property:
    def get(self: LoraWeights) -> torch.Tensor | None:
        return self._lora.get(name)

    def set(self: LoraWeights, tensor: torch.Tensor) -> None:
        check_lora(self._settings.where, name, tensor, self._shapes[name])
        with self._exclusive(f"assignment to {name}"):
            self._need_idle(f"assignment to {name}")
            lora = self._lora | {name: tensor}
            self._lora = {key: lora[key] for key in LORA_NAMES if key in lora}

    side = "[E, R, in]" if name.endswith("a") else "[E, out, R]"
    return property(get, set, doc=f"{side}; after assigning to it call update_lora_weights.")


for _name in LORA_NAMES:
    setattr(LoraWeights, _name, _lora_attribute(_name))
