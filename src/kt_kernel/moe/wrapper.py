"""The base of the wrappers of all modes: settings, weights, and the static buffer calls."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..runtime.forks import per_process
from ..runtime.pools import get_team
from ..runtime.tensors import on_cpu
from ..runtime.variant import debug, native
from ..weights.dequantise import dequantise
from ..weights.expert_tensors import BIASES, MATRICES, Matrix
from ..weights.formats import LayerForm
from ..weights.loading import Expert, LoadRecord, batches, bytes_of
from ..weights.packed import PackedMatrix
from ..weights.quantised import NO_MATRIX, CoreSource, QuantisedMatrix, column_order, in_order
from ..weights.store import saving
from . import buffers
from .arguments import WrapperArguments
from .cpu_buffer import KExpertsCPUBuffer
from .settings import LayerSettings, check_sizes
from .tuning import WORTH_BYTES, layer_tuning
from .weight_checks import DENSE_FORM, WeightChecks

#: Returns what is packed in place of one matrix of a slot: (slot, "gate", matrix) -> matrix.
ChangeMatrix = Callable[[int, str, torch.Tensor], torch.Tensor]


@contextmanager
def naming_path(where: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Adds the layer and the path to a ValueError raised inside."""
    try:
        yield
    except ValueError as error:
        problem = str(error).removeprefix(f"{where}: ")
        raise ValueError(f"{where}: weight_path {path}: {problem}") from error


class BaseMoEWrapper(WrapperArguments):
    """One MoE layer: its settings, and the loading of its experts on the CPU."""

    _load_lock: threading.RLock

    def __init__(self, settings: LayerSettings) -> None:
        self._settings = settings
        self._placement = settings.placement
        self._checks = WeightChecks(settings)
        self._core: Any = None  # the compiled layer, from the first weights on
        self._form: LayerForm | None = None  # of its weights
        self._loaded = False
        self._record = LoadRecord()
        self._arrived: set[int] = set()
        self._change: ChangeMatrix | None = None
        # Another thread of the parent may be loading at the fork. In the child it is not loaded.
        per_process(self, "_load_lock", threading.RLock)

    # ---- what it is -------------------------------------------------------------------------

    @property
    def loaded(self) -> bool:
        """Whether the weights are complete."""
        return self._loaded

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed weights held; 0 before the first expert arrives."""
        return self._core.packed_bytes if self._core is not None else 0

    @property
    def load_record(self) -> LoadRecord:
        """Time and bytes of loading so far."""
        return replace(self._record, packed_bytes=self.packed_bytes)

    def stats(self) -> dict[str, int]:
        """Counters since loading: forwards, tokens, expert_calls (token-expert pairs computed),
        experts_touched, tile_calls (GEMM), vector_calls (GEMV), stolen_tasks. Empty before the
        first expert arrives."""
        return dict(self._core.stats()) if self._core is not None else {}

    def describe(self) -> str:
        """One line: method, kernel table, threads, and which slots are on the CPU."""
        s = self._settings
        return (
            f"layer {s.layer_idx}: {s.method.name}, {s.table} kernels, threads "
            f"{s.pools.describe()}, {s.num_experts - self.num_gpu_experts} of {s.num_experts} "
            "experts on the CPU"
        )

    # ---- buffers ----------------------------------------------------------------------------

    @staticmethod
    def set_capture_batch_sizes(capture_bs: Sequence[int]) -> None:
        """Announces the batch sizes to be captured in CUDA graphs; their buffers are kept.

        Raises:
            ValueError: a size that is not a positive integer.
        """
        buffers.set_capture_batch_sizes(capture_bs)

    @staticmethod
    def get_capture_batch_sizes() -> list[int]:
        """The sizes given to ``set_capture_batch_sizes``."""
        return buffers.get_capture_batch_sizes()

    @staticmethod
    def clear_buffer_cache() -> int:
        """Frees the inference buffers that no captured graph or pending call refers to; returns
        their bytes."""
        return buffers.clear_buffer_cache() + KExpertsCPUBuffer.clear()

    @staticmethod
    def clear_sft_buffer_cache() -> int:
        """Frees the fine-tuning buffers that no pending call refers to, and the memory that forward
        passes left for the next ones; returns their bytes."""
        from ..sft.buffers import KExpertsSFTBuffer  # inference does not need it

        spare: int = native().SftLayer.free_spare()
        return KExpertsSFTBuffer.clear_cache() + spare

    # ---- loading ----------------------------------------------------------------------------

    def change_weights(self, change: ChangeMatrix) -> None:
        """Makes loading pack what ``change`` returns, in place of each dense matrix.

        Args:
            change: called with slot, "gate", "up" or "down", and the matrix (bf16, fp16 or fp32,
                not to be written to); returns one of that shape in any of these dtypes. One batch
                of experts is changed at a time.

        Raises:
            RuntimeError: loading has begun.
            ValueError: ``cpu_save=True``.
        """
        where = self._settings.where
        if self._settings.cpu_save:
            raise ValueError(f"{where}: cpu_save=True writes the weights as they are")
        with self._load_lock:
            if self._core is not None:
                raise RuntimeError(f"{where}: change_weights after loading has begun")
            self._change = change

    def load_weights_from_tensors(
        self,
        gate_proj: torch.Tensor | Sequence[Matrix] | None,
        up_proj: torch.Tensor | Sequence[Matrix],
        down_proj: torch.Tensor | Sequence[Matrix],
        physical_to_logical_map_cpu: torch.Tensor,
        *,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        """Packs the experts of this layer that are on the CPU. The tensors may be freed afterwards.

        Args:
            gate_proj, up_proj: [E, I, H], down_proj: [E, H, I], logical order; bf16, fp16 or fp32,
                any device. For a method that takes quantised weights
                (``methods.Method.takes_quantised``): E matrices [I, H], [I, H] and [H, I]; the
                gates, the ups and the downs each of one form. LLAMAFILE, MIXED: or dense.
                With ``gated=False``, gate_proj and gate_bias are None.
            physical_to_logical_map_cpu: [E] integers on the CPU: slot p holds logical expert
                ``map[p]``; repeats are legal.
            gate_bias, up_bias: [E, I], down_bias: [E, H]; any float dtype.

        With ``cpu_save=True`` all experts of the layer are also written to ``weight_path``.

        A second call after a successful load does nothing. After an error, the wrapper is
        still not loaded.

        Raises:
            TypeError: not tensors.
            OSError: ``cpu_save=True``, and the layer cannot be written; names folder or file.
                Raised before packing where possible.
            ValueError: wrong shape or dtype, an invalid map, a weight that is not finite (integer
                and FP8 methods), or a scale that is negative or not finite; ``cpu_save=True``, and
                ``weight_path`` holds something else.
        """
        if self._loaded:
            return
        s = self._settings
        given: dict[str, Any] = dict(zip(MATRICES, (gate_proj, up_proj, down_proj), strict=True))
        given |= zip(BIASES, (gate_bias, up_bias, down_bias), strict=True)
        form = self._checks.layer(given)
        given = {name: part for name, part in given.items() if part is not None}
        mapping = self._mapping(physical_to_logical_map_cpu)
        save = None
        if s.cpu_save:
            saving.check_target(s, given.values())
            save = functools.partial(self._save, form, given, mapping)
        self._load_all(
            form,
            (
                (slot, {name: tensor[mapping[slot]] for name, tensor in given.items()})
                for slot in self._cpu_slots()
            ),
            save=save,
        )

    def load_weights(self, physical_to_logical_map_cpu: torch.Tensor) -> None:
        """Reads this layer's experts from ``weight_path`` and packs those on the CPU.

        With ``cpu_save=True``, the layer is loaded from a packed directory: ``weight_path`` itself
        if it is one, else its subfolder ``kt-packed`` (for a file, the subfolder of its folder). If
        that lacks the layer, all of its experts are quantised and written there first.

        Args:
            physical_to_logical_map_cpu: as in ``load_weights_from_tensors``.

        File headers are checked before anything is packed. After an error,
        the wrapper is still not loaded.

        Raises:
            RuntimeError: no ``weight_path`` was given.
            ValueError: an invalid map, or a checkpoint that does not fit; names file, tensor,
                expected and found sizes. ``cpu_save=True``: ``kt-packed`` was made from another
                checkpoint or for another method, or is not a packed directory.
            FileNotFoundError, PermissionError: nothing to read.
            OSError: ``cpu_save=True``, and the layer cannot be written; names folder or file.
                Raised before quantising where possible.
        """
        if self._loaded:
            return
        s = self._settings
        if s.weight_path is None:
            raise RuntimeError(
                f"{s.where}: load_weights needs weight_path, which was not given; pass it to the "
                "constructor, or pass tensors to load_weights_from_tensors"
            )
        mapping = self._mapping(physical_to_logical_map_cpu)
        path, saved = s.weight_path, None
        if s.cpu_save:
            from .whole import packed_copy  # imports this module

            path, saved = packed_copy(s)
        slots: dict[int, list[int]] = {}  # by logical expert
        for slot in self._cpu_slots():
            slots.setdefault(mapping[slot], []).append(slot)
        if not slots:
            self.finish_loading()
            return
        from ..checkpoint import open_checkpoint  # the readers are not needed without a path

        # Few at a time, so that only these are in memory twice while they are converted.
        with (
            naming_path(s.where, path),
            open_checkpoint(path).each_expert(
                s.layer_idx,
                s.num_experts,
                s.hidden_size,
                s.moe_intermediate_size,
                slots,
                method=self._reads_as,
            ) as experts,
        ):
            if ("gate" in experts.fields) != s.activation.gated:
                found = "have a gate" if "gate" in experts.fields else "have no gate"
                raise ValueError(
                    f"the experts of the checkpoint {found}, but gated={s.activation.gated}"
                )
            self._load_all(
                experts.form or s.method.layer_form or LayerForm.same(DENSE_FORM),
                ((slot, tensors) for logical, tensors in experts for slot in slots[logical]),
                stored_bytes=lambda: experts.stored_bytes,
            )
        if saved is not None:
            self._record.source_bytes = saved.source_bytes
            self._record.seconds += saved.seconds

    def load_expert(
        self,
        slot: int,
        gate_proj: Matrix | None,
        up_proj: Matrix,
        down_proj: Matrix,
        *,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        """Packs one expert, for weights that arrive one by one; then call ``finish_loading``.

        Args:
            slot: 0 … E-1, a slot on the CPU. If a slot is given twice, the later call counts, also
                for biases: if it has none, the slot has none.
            gate_proj, up_proj: [I, H], down_proj: [H, I]; bf16, fp16 or fp32, any device. For a
                method that takes quantised weights: in the same form as the first expert. With
                ``gated=False``, gate_proj and gate_bias are None.
            gate_bias, up_bias: [I], down_bias: [H].

        After an error while packing, the slot counts as not loaded.

        Raises:
            RuntimeError: loading is finished.
            TypeError, ValueError: as ``load_weights_from_tensors``, or a slot on the GPU.
        """
        s = self._settings
        slot = self._checks.slot(slot)
        expert: Expert = dict(zip(MATRICES, (gate_proj, up_proj, down_proj), strict=True))
        expert |= zip(BIASES, (gate_bias, up_bias, down_bias), strict=True)
        form = self._checks.expert(slot, expert)
        if s.cpu_save:
            raise ValueError(
                f"{s.where}: cpu_save=True writes whole layers, and load_expert gives the experts "
                "on the CPU only; use load_weights_from_tensors"
            )
        with self._load_lock:
            if self._loaded:
                raise RuntimeError(f"{s.where}: load_expert after loading was finished")
            if self._core is None:
                self._core, self._form = self._make_core(form), form
            if form != self._form:
                raise ValueError(
                    f"{s.where}: slot {slot} is {form}; slots loaded before are {self._form}"
                )
            self._arrived.discard(slot)
            with self._record.timed():
                self._pack(self._core, [(slot, expert)])
            self._record.source_bytes += bytes_of(expert)
            self._arrived.add(slot)

    def finish_loading(self) -> None:
        """Declares the weights complete. A second call does nothing.

        Raises:
            ValueError: cold experts are missing; names their slots.
        """
        with self._load_lock:
            if self._loaded:
                return
            missing = [slot for slot in self._cpu_slots() if slot not in self._arrived]
            if missing:
                raise ValueError(
                    f"{self._settings.where}: {len(missing)} cold experts were not loaded: slots "
                    f"{missing}"
                )
            if self._core is None:  # no expert is on the CPU, so any form works
                any_form = self._settings.method.layer_form or LayerForm.same(DENSE_FORM)
                self._core = self._make_core(any_form)
            self._loaded = True
            self._change = None
            debug(f"{self.describe()}; {self.load_record.describe()}")

    def _load_all(
        self,
        form: LayerForm,
        experts: Iterable[tuple[int, Expert]],
        stored_bytes: Callable[[], int] | None = None,
        save: Callable[[Any], None] | None = None,
    ) -> None:
        """Packs ``experts``, which are those of all CPU slots. stored_bytes: their bytes in files;
        None: the bytes that were given. ``save`` gets the compiled layer before it counts as
        loaded."""
        with self._load_lock:
            if self._loaded:
                return
            record = LoadRecord()
            with record.timed():
                core = self._make_core(form)  # a failure leaves earlier weights untouched
                for batch in batches(experts):
                    self._pack(core, batch)
                    record.source_bytes += sum(bytes_of(expert) for _, expert in batch)
            if stored_bytes is not None:
                record.source_bytes = stored_bytes()
            if save is not None:
                save(core)
            self._core, self._form, self._record = core, form, record
            self._arrived = set(self._cpu_slots())
            self.finish_loading()

    def _save(self, form: LayerForm, given: dict[str, Any], mapping: list[int], core: Any) -> None:
        """Writes the layer: all experts, in logical order."""
        from .whole import WholeLayer  # imports this module

        s = self._settings
        if all(s.cpu_slots) and mapping == list(range(s.num_experts)):
            biases = {
                name: on_cpu(given[name], torch.float32).numpy() for name in BIASES if name in given
            }
            layer = saving.packed_layer(s, form, core, biases)
        else:
            layer = WholeLayer(s).load_from_tensors(given)
        saving.save_layer(s, layer)

    def _make_core(self, form: LayerForm) -> Any:
        s = self._settings
        check_sizes(form, s.method.name, s.hidden_size, s.moe_intermediate_size, s.where)
        tuning = self._tuning(form)
        try:
            return native().MoeLayer(
                get_team(s.pools),
                num_experts=s.num_experts,
                top_k=s.num_experts_per_tok,
                hidden_size=s.hidden_size,
                intermediate_size=s.moe_intermediate_size,
                forms=[one.core for one in form],
                cpu_slots=s.cpu_slots,
                max_tokens=s.max_tokens,
                table=s.table,
                kind=s.kind,
                **s.activation.core,
                **tuning,
            )
        except MemoryError:
            raise MemoryError(
                f"{s.where}: not enough memory for {len(self._cpu_slots())} experts of hidden_size="
                f"{s.hidden_size}, moe_intermediate_size={s.moe_intermediate_size} in "
                f"{s.method.name}, and their buffers"
            ) from None

    def _tuning(self, form: LayerForm) -> dict[str, Any]:
        """Tuned arguments of the compiled layer; measured only for large layers."""
        s = self._settings
        matrices = len(s.matrices) * len(self._cpu_slots())
        values = matrices * s.hidden_size * s.moe_intermediate_size
        if values // 2 < WORTH_BYTES or s.kind:  # at least half a byte each
            return {}
        return layer_tuning(form, s.table)

    def _pack(self, core: Any, experts: Sequence[tuple[int, Expert]]) -> None:
        """Packs experts by slot, all at once, or copies packed ones."""
        kept = []  # owns the memory of the addresses below
        given = []
        try:
            for slot, expert in experts:
                gate, up, down = (
                    None
                    if name not in self._settings.matrices
                    else self._packable(
                        f"{name} of slot {slot}", self._changed(slot, name, expert[name])
                    )
                    for name in MATRICES
                )
                assert up is not None and down is not None  # only a gate may be missing
                # The columns of down may have an order: gate and up make h in that order.
                rows = None if isinstance(down, PackedMatrix) else column_order(down)
                biases = [
                    None if bias is None else in_order(on_cpu(bias, torch.float32), order)
                    for bias, order in zip(map(expert.get, BIASES), (rows, rows, None), strict=True)
                ]
                if isinstance(gate, PackedMatrix):
                    assert isinstance(up, PackedMatrix) and isinstance(down, PackedMatrix)
                    tiles = [gate.tiles, up.tiles, down.tiles]
                    arrays = [None if bias is None else bias.numpy() for bias in biases]
                    core.load_packed(slot, *tiles, *arrays)
                    continue
                assert not isinstance(up, PackedMatrix) and not isinstance(down, PackedMatrix)
                addresses = [0 if bias is None else bias.data_ptr() for bias in biases]
                sources = [
                    None if gate is None else CoreSource(gate, rows),
                    CoreSource(up, rows),
                    CoreSource(down),
                ]
                kept.append((sources, biases))
                matrices = [source.address if source else NO_MATRIX for source in sources]
                dtypes = [source.dtype if source else -1 for source in sources]
                orders = [source.order if source else 0 for source in sources[:2]]
                given.append((slot, matrices, dtypes, addresses, orders))
            if given:
                core.load_many(given, scale_search=self._settings.scale_search)
        except ValueError as error:
            raise ValueError(f"{self._settings.where}: {error}") from None

    def _mapping(self, given: torch.Tensor) -> list[int]:
        """The logical expert of each slot; ValueError for what is no map."""
        return self._checks.mapping(given)

    @property
    def _reads_as(self) -> str:
        """The inference method whose weights are asked of a checkpoint."""
        return self._settings.method.name

    def _changed(self, slot: int, name: str, matrix: Matrix) -> Matrix:
        """The matrix after `change_weights`."""
        if self._change is None:
            return matrix
        # A method that quantises takes some quantised weights over, but changed ones are new ones.
        if isinstance(matrix, QuantisedMatrix) and not self._settings.method.quantised:
            matrix = dequantise(matrix)
        if not isinstance(matrix, torch.Tensor):
            raise ValueError(f"{name} of slot {slot} is quantised, so it cannot be changed")
        return self._change(slot, name, matrix)

    def _packable(self, place: str, matrix: Matrix) -> Matrix:
        """The matrix as the compiled core packs it."""
        return matrix

    def _cpu_slots(self) -> tuple[int, ...]:
        """The slots whose weights the CPU gets."""
        return self._settings.placement.cold_experts
