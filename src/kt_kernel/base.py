"""What the wrappers of all modes share: settings, weights, and the static buffer calls."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from . import buffers
from .experts import BIASES, MATRICES, Matrix, matrix_shapes
from .forks import give_lock
from .loading import Expert, LoadRecord, batches, bytes_of
from .methods import BF16_WEIGHTS, LayerForm, WeightForm
from .packed import PackedMatrix
from .pools import get_team
from .quantised import CoreSource, QuantisedMatrix, check_matrix, column_order, in_order
from .settings import LayerSettings, check_sizes, integer
from .store import saving
from .tensors import DTYPE_NAMES, DTYPES, is_integer, need_dense, need_tensor, on_cpu
from .tuning import WORTH_BYTES, layer_tuning
from .variant import debug, native

_DENSE_FORM = WeightForm(BF16_WEIGHTS)  # of dense weights where the method does not tell


class BaseMoEWrapper:
    """One MoE layer: its settings, and the loading of its experts on the CPU."""

    def __init__(self, settings: LayerSettings) -> None:
        self._settings = settings
        self._core: Any = None  # the compiled layer, from the first weights on
        self._form: LayerForm | None = None  # of its weights
        self._loaded = False
        self._record = LoadRecord()
        self._arrived: set[int] = set()
        # Another thread of a parent may load while it forks; to the child that is not loaded.
        give_lock(self, "_load_lock", threading.RLock)

    # ---- what it is -------------------------------------------------------------------------

    @property
    def layer_idx(self) -> int:
        """As given to the constructor."""
        return self._settings.layer_idx

    @property
    def num_experts(self) -> int:
        """E, experts of the layer on both sides."""
        return self._settings.num_experts

    @property
    def num_gpu_experts(self) -> int:
        """How many experts the mask puts on the GPU."""
        return int(self._settings.gpu_experts_mask.sum())

    @property
    def gpu_experts_mask(self) -> torch.Tensor:
        """A copy of the mask: bool [E], True = on the GPU."""
        return self._settings.gpu_experts_mask.clone()

    @property
    def method(self) -> str:
        """As given to the constructor."""
        return self._settings.method.name

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
        """What loading took so far."""
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
            f"{'+'.join(map(str, s.pools.threads))} on NUMA nodes "
            f"{','.join(map(str, s.pools.nodes))}, {s.num_experts - self.num_gpu_experts} of "
            f"{s.num_experts} experts on the CPU"
        )

    # ---- buffers ----------------------------------------------------------------------------

    @staticmethod
    def set_capture_batch_sizes(sizes: Sequence[int]) -> None:
        """Announces the batch sizes to be captured in CUDA graphs; their buffers are kept."""
        buffers.set_capture_batch_sizes(sizes)

    @staticmethod
    def get_capture_batch_sizes() -> list[int]:
        """The sizes given to ``set_capture_batch_sizes``."""
        return buffers.get_capture_batch_sizes()

    @staticmethod
    def clear_buffer_cache() -> int:
        """Frees the inference buffers that no pending call uses; returns their bytes."""
        return buffers.clear_buffer_cache()

    @staticmethod
    def clear_sft_buffer_cache() -> int:
        """Frees the fine-tuning buffers that no pending call uses; returns their bytes."""
        return 0  # no fine-tuning call exists that could have made any

    # ---- loading ----------------------------------------------------------------------------

    def load_weights_from_tensors(
        self,
        gate: torch.Tensor | Sequence[Matrix],
        up: torch.Tensor | Sequence[Matrix],
        down: torch.Tensor | Sequence[Matrix],
        physical_to_logical_map_cpu: torch.Tensor,
        *,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        """Packs the experts of this layer that are on the CPU. They may be freed afterwards.

        Args:
            gate, up: [E, I, H], down: [E, H, I], logical order; bf16, fp16 or fp32, any device.
                For a method that takes quantised weights (``methods.Method.takes_quantised``): E
                matrices [I, H], [I, H] and [H, I], all of one form; LLAMAFILE: the gates, the ups
                and the downs each of one form, or dense.
            physical_to_logical_map_cpu: [E] integers on the CPU: slot p holds logical expert
                ``map[p]``; repeats are legal.
            gate_bias, up_bias: [E, I], down_bias: [E, H]; any float dtype.

        With ``cpu_save=True`` all experts of the layer are also written to ``weight_path``.

        A second call after a successful load does nothing. After an error the wrapper is as
        unloaded as before.

        Raises:
            TypeError: not tensors.
            OSError: ``cpu_save=True``, and the layer could not be written; names the file.
            ValueError: wrong shape or dtype, a map that is wrong, a weight that is not finite
                (integer and FP8 methods) or a scale that is negative or not finite;
                ``cpu_save=True``, and ``weight_path`` holds something else.
        """
        if self._loaded:
            return
        s = self._settings
        e, h, i = s.num_experts, s.hidden_size, s.moe_intermediate_size
        form = self._common_form([
            self._check_matrices(name, matrices, *shape)
            for name, matrices, shape in zip(MATRICES, (gate, up, down), self._shapes, strict=True)
        ])  # fmt: skip
        for name, bias, shape in (
            ("gate_bias", gate_bias, (e, i)), ("up_bias", up_bias, (e, i)),
            ("down_bias", down_bias, (e, h)),
        ):  # fmt: skip
            self._check_bias(name, bias, shape)
        mapping = self._check_map(physical_to_logical_map_cpu)
        matrices = dict(zip(MATRICES, (gate, up, down), strict=True))
        biases = zip(BIASES, (gate_bias, up_bias, down_bias), strict=True)
        given = matrices | {name: bias for name, bias in biases if bias is not None}

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

        With ``cpu_save=True`` ``weight_path`` must be a packed directory, from which the layer is
        loaded as it is: nothing is written beside a checkpoint.

        Args:
            physical_to_logical_map_cpu: as in ``load_weights_from_tensors``.

        All that the files say of themselves is checked before anything is packed. After an error
        the wrapper is as unloaded as before.

        Raises:
            ValueError: no ``weight_path``, a wrong map, or a checkpoint that does not fit; names
                file, tensor, expected and found sizes.
            FileNotFoundError, PermissionError: nothing to read.
        """
        if self._loaded:
            return
        s = self._settings
        if s.weight_path is None:
            raise ValueError(
                f"{s.where}: load_weights needs weight_path, which was not given; pass it to the "
                "constructor, or pass tensors to load_weights_from_tensors"
            )
        if s.cpu_save:
            saving.check_source(s)
        mapping = self._check_map(physical_to_logical_map_cpu)
        slots: dict[int, list[int]] = {}  # by logical expert
        for slot in self._cpu_slots():
            slots.setdefault(mapping[slot], []).append(slot)
        if not slots:
            self.finish_loading()
            return
        from .checkpoint import open_checkpoint  # the readers are not needed without a path

        # Few at a time: what has to be transposed or converted is not in memory twice for all.
        try:
            with open_checkpoint(s.weight_path).each_expert(
                s.layer_idx,
                s.num_experts,
                s.hidden_size,
                s.moe_intermediate_size,
                slots,
                method=s.method.name,
            ) as experts:
                self._load_all(
                    experts.form or s.method.layer_form or LayerForm.same(_DENSE_FORM),
                    ((slot, tensors) for logical, tensors in experts for slot in slots[logical]),
                    stored_bytes=lambda: experts.stored_bytes,
                )
        except ValueError as error:
            problem = str(error).removeprefix(f"{s.where}: ")
            raise ValueError(f"{s.where}: weight_path {s.weight_path}: {problem}") from error

    def load_expert(
        self,
        slot: int,
        gate: Matrix,
        up: Matrix,
        down: Matrix,
        gate_bias: torch.Tensor | None = None,
        up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        """Packs one expert, for weights that arrive one by one; then call ``finish_loading``.

        Args:
            slot: 0 … E-1, a slot on the CPU. A slot given twice keeps what is given later, of
                biases too: none then means none.
            gate, up: [I, H], down: [H, I]; bf16, fp16 or fp32, any device. For a method that takes
                quantised weights: of the form that the first expert's had.
            gate_bias, up_bias: [I], down_bias: [H].

        After an error while packing, the slot counts as not loaded.

        Raises:
            RuntimeError: loading is finished.
            TypeError, ValueError: as ``load_weights_from_tensors``, or a slot on the GPU.
        """
        s = self._settings
        slot = self._check_slot(slot)
        h, i = s.hidden_size, s.moe_intermediate_size
        names = [f"{name} of slot {slot}" for name in MATRICES]
        form = self._common_form([
            [(name, self._check_matrix(name, matrix, shape))]
            for name, matrix, shape in zip(names, (gate, up, down), self._shapes, strict=True)
        ])  # fmt: skip
        self._check_bias("gate_bias", gate_bias, (i,), slot)
        self._check_bias("up_bias", up_bias, (i,), slot)
        self._check_bias("down_bias", down_bias, (h,), slot)
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
            expert = {"gate": gate, "up": up, "down": down}
            expert |= zip(BIASES, (gate_bias, up_bias, down_bias), strict=True)
            with self._record.timed():
                self._pack(self._core, [(slot, expert)])
            self._record.source_bytes += bytes_of(expert)
            self._arrived.add(slot)

    def finish_loading(self) -> None:
        """Declares the weights complete. A second call does nothing.

        Raises:
            ValueError: CPU experts are missing; names their slots.
        """
        with self._load_lock:
            if self._loaded:
                return
            missing = [slot for slot in self._cpu_slots() if slot not in self._arrived]
            if missing:
                raise ValueError(
                    f"{self._settings.where}: {len(missing)} CPU experts were not loaded: slots "
                    f"{missing}"
                )
            if self._core is None:  # no expert is on the CPU, so any form will do
                any_form = self._settings.method.layer_form or LayerForm.same(_DENSE_FORM)
                self._core = self._make_core(any_form)
            self._loaded = True
            debug(f"{self.describe()}; {self.load_record.describe()}")

    def _load_all(
        self,
        form: LayerForm,
        experts: Iterable[tuple[int, Expert]],
        stored_bytes: Callable[[], int] | None = None,
        save: Callable[[Any], None] | None = None,
    ) -> None:
        """Packs ``experts``, which are those of all CPU slots. stored_bytes: what files have of
        those given; None: as much as was given. ``save`` gets the compiled layer before it counts
        as loaded."""
        with self._load_lock:
            if self._loaded:
                return
            record = LoadRecord()
            with record.timed():
                core = self._make_core(form)  # a failure leaves what was loaded before untouched
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
        s = self._settings
        if not all(s.cpu_slots) or mapping != list(range(s.num_experts)):
            nothing = torch.zeros_like(s.gpu_experts_mask)
            whole = BaseMoEWrapper(replace(s, gpu_experts_mask=nothing, cpu_save=False))
            whole.load_weights_from_tensors(
                **given, physical_to_logical_map_cpu=torch.arange(s.num_experts, device="cpu")
            )
            core = whole._core
        biases = {
            name: on_cpu(given[name], torch.float32).numpy() for name in BIASES if name in given
        }
        saving.save_layer(s, form, core, biases)

    def _make_core(self, form: LayerForm) -> Any:
        s = self._settings
        check_sizes(form, s.method.name, s.hidden_size, s.moe_intermediate_size, s.where)
        if s.group_size not in (None, form.gate.group_size):  # no method that has it mixes forms
            raise ValueError(
                f"{s.where}: group_size={s.group_size} was given, but the weights have groups of "
                f"{form.gate.group_size}"
            )
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
                swiglu_limit=s.swiglu_limit,
                swiglu_alpha=s.swiglu_alpha,
                max_tokens=s.max_tokens,
                table=s.table,
                kind=s.kind,
                **tuning,
            )
        except MemoryError:
            raise MemoryError(
                f"{s.where}: not enough memory for {len(self._cpu_slots())} experts of hidden_size="
                f"{s.hidden_size}, moe_intermediate_size={s.moe_intermediate_size} in "
                f"{s.method.name}, and their buffers"
            ) from None

    def _tuning(self, form: LayerForm) -> dict[str, Any]:
        """What the compiled layer is made with beyond its shape; measured for large layers only."""
        s = self._settings
        values = 3 * len(self._cpu_slots()) * s.hidden_size * s.moe_intermediate_size
        if values // 2 < WORTH_BYTES or s.kind:  # half a byte each at least
            return {}
        return layer_tuning(form, s.table)

    def _pack(self, core: Any, experts: Sequence[tuple[int, Expert]]) -> None:
        """Packs experts by slot, all in one go; or copies packed ones."""
        kept = []  # what the addresses below are of
        given = []
        try:
            for slot, expert in experts:
                gate, up, down = (expert[name] for name in MATRICES)
                # The columns of down may have an order: gate and up make h in that order.
                rows = column_order(down)
                biases = [
                    None if bias is None else in_order(on_cpu(bias, torch.float32), order)
                    for bias, order in zip(map(expert.get, BIASES), (rows, rows, None), strict=True)
                ]
                addresses = [0 if bias is None else bias.data_ptr() for bias in biases]
                if isinstance(gate, PackedMatrix):
                    tiles = [matrix.tiles.ctypes.data for matrix in (gate, up, down)]
                    core.load_packed(slot, *tiles, *addresses)
                    continue
                sources = [CoreSource(gate, rows), CoreSource(up, rows), CoreSource(down)]
                kept.append((sources, biases))
                given.append((
                    slot,
                    [source.address for source in sources],
                    [source.dtype for source in sources],
                    addresses,
                    [source.order for source in sources[:2]],
                ))  # fmt: skip
            if given:
                core.load_many(given, scale_search=self._settings.scale_search)
        except ValueError as error:
            raise ValueError(f"{self._settings.where}: {error}") from None

    def _cpu_slots(self) -> list[int]:
        return [slot for slot, here in enumerate(self._settings.cpu_slots) if here]

    def _check_slot(self, slot: Any) -> int:
        s = self._settings
        slot = integer(f"{s.where}: slot", slot, 0, s.num_experts - 1)
        if s.gpu_experts_mask[slot]:
            raise ValueError(
                f"{s.where}: slot {slot} is on the GPU; on the CPU: {self._cpu_slots()}"
            )
        return slot

    def _place(self, name: str, slot: int | None) -> str:
        return f"{self._settings.where}: {name}" + ("" if slot is None else f" of slot {slot}")

    @property
    def _shapes(self) -> tuple[tuple[int, int], ...]:
        """[N, K] of an expert's gate, up and down."""
        s = self._settings
        return tuple(matrix_shapes(s.hidden_size, s.moe_intermediate_size).values())

    def _check_matrices(
        self, name: str, matrices: Any, rows: int, columns: int
    ) -> list[tuple[str, WeightForm]]:
        """Names and forms of all experts' matrices; a single one for a tensor [E, N, K]."""
        s = self._settings
        is_tensor = isinstance(matrices, torch.Tensor)
        if not s.method.takes_quantised or (is_tensor and s.method.takes_dense):
            return [(name, self._check_weight(name, matrices, (s.num_experts, rows, columns)))]
        if is_tensor or not isinstance(matrices, Sequence):
            kinds = "tensors or QuantisedMatrix" if s.method.takes_dense else "QuantisedMatrix"
            raise TypeError(
                f"{s.where}: {name} must be a sequence of {s.num_experts} {kinds} for "
                f"method {s.method.name}, got {type(matrices).__name__}"
            )
        if len(matrices) != s.num_experts:
            raise ValueError(
                f"{s.where}: {name} must have {s.num_experts} matrices, got {len(matrices)}"
            )
        places = [f"{name}[{expert}]" for expert in range(s.num_experts)]
        return [
            (place, self._check_matrix(place, matrix, (rows, columns)))
            for place, matrix in zip(places, matrices, strict=True)
        ]

    def _check_matrix(self, name: str, matrix: Any, shape: tuple[int, int]) -> WeightForm:
        """The form that one expert's matrix has or gets, once its shape and dtype are right."""
        s = self._settings
        is_quantised = isinstance(matrix, QuantisedMatrix)
        if not s.method.takes_dense or (is_quantised and s.method.takes_quantised):
            return check_matrix(f"{s.where}: {name}", matrix, s.method.formats, *shape)
        return self._check_weight(name, matrix, shape)

    def _common_form(self, matrices: Sequence[Sequence[tuple[str, WeightForm]]]) -> LayerForm:
        """The form of a layer whose gates, ups and downs have these names and forms."""
        s = self._settings
        every = [each[0] for each in matrices] if s.method.mixed else [matrices[0][0]] * 3
        for (first, expected), each in zip(every, matrices, strict=True):
            for name, form in each:
                if form != expected:
                    raise ValueError(f"{s.where}: {name} is {form}; {first} is {expected}")
        return LayerForm(*(form for _, form in every))

    def _check_weight(self, name: str, tensor: Any, shape: tuple[int, ...]) -> WeightForm:
        """The form that dense weights get."""
        method, place = self._settings.method, self._place(name, None)
        if method.takes_quantised and not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{place} must be a tensor or a QuantisedMatrix, got {type(tensor).__name__}"
            )
        need_tensor(place, tensor)
        need_dense(place, tensor)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{place} must be {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{place} has dtype {tensor.dtype}; accepted: {DTYPE_NAMES}")
        return method.form or _DENSE_FORM

    def _check_bias(
        self, name: str, tensor: Any, shape: tuple[int, ...], slot: int | None = None
    ) -> None:
        if tensor is None:
            return
        place = self._place(name, slot)
        need_tensor(place, tensor)
        need_dense(place, tensor)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{place} must be {list(shape)}, got {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise ValueError(f"{place} has dtype {tensor.dtype}; accepted: float dtypes")

    def _check_map(self, mapping: Any) -> list[int]:
        s = self._settings
        place = f"{s.where}: physical_to_logical_map_cpu"
        need_tensor(place, mapping)
        if mapping.device.type != "cpu":
            raise ValueError(f"{place} must be on the CPU, it is on {mapping.device}")
        need_dense(place, mapping)
        if not is_integer(mapping):
            raise ValueError(f"{place} has dtype {mapping.dtype}; accepted: integer dtypes")
        if tuple(mapping.shape) != (s.num_experts,):
            raise ValueError(f"{place} must be [{s.num_experts}], got {list(mapping.shape)}")
        logical = [int(value) for value in mapping.tolist()]
        for slot, value in enumerate(logical):
            if not 0 <= value < s.num_experts:
                raise ValueError(f"{place}[{slot}] = {value}; accepted: 0 to {s.num_experts - 1}")
        return logical
