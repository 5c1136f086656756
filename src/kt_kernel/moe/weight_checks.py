"""Checks the weights, biases and maps passed to a wrapper before anything is packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.tensors import DTYPE_NAMES, DTYPES, is_integer, need_dense, need_tensor
from ..weights.expert_tensors import MATRICES, matrix_shapes
from ..weights.formats import BF16, LayerForm, WeightForm
from ..weights.quantised import QuantisedMatrix, check_matrix
from .settings import LayerSettings
from .values import integer

#: Form of dense weights if the method has none.
DENSE_FORM = WeightForm(BF16)

#: Parameter names of `MATRICES`.
PARAMETERS = {name: f"{name}_proj" for name in MATRICES}


class WeightChecks:
    """Raises TypeError or ValueError naming the layer and the argument."""

    def __init__(self, settings: LayerSettings) -> None:
        self._settings = settings
        self._shapes = matrix_shapes(settings.hidden_size, settings.moe_intermediate_size)

    def layer(self, given: dict[str, Any]) -> LayerForm:
        """The form of a layer given as `MATRICES`, all experts each, and `BIASES`."""
        s = self._settings
        self._no_gate(given)
        form = self._common_form(
            [
                self._matrices(PARAMETERS[name], given[name], self._shapes[name])
                for name in s.matrices
            ]
        )
        for name in s.matrices:
            self._bias(f"{name}_bias", given, (s.num_experts, self._shapes[name][0]))
        return form

    def expert(self, slot: int, given: dict[str, Any]) -> LayerForm:
        """The form of one expert given as `MATRICES` and `BIASES`."""
        self._no_gate(given, f" of slot {slot}")
        names = self._settings.matrices
        places = {name: f"{PARAMETERS[name]} of slot {slot}" for name in names}
        form = self._common_form(
            [
                [(place, self._matrix(place, given[name], self._shapes[name]))]
                for name, place in places.items()
            ]
        )
        for name in names:
            self._bias(f"{name}_bias", given, self._shapes[name][:1], f" of slot {slot}")
        return form

    def slot(self, slot: Any) -> int:
        """A slot on the CPU."""
        s = self._settings
        slot = integer(f"{s.where}: slot", slot, 0, s.num_experts - 1)
        here = s.placement.cold_experts
        if slot not in here:
            raise ValueError(f"{s.where}: slot {slot} is on the GPU; on the CPU: {list(here)}")
        return slot

    def mapping(self, mapping: Any) -> list[int]:
        """The logical expert of each slot."""
        s = self._settings
        place = f"{s.where}: physical_to_logical_map_cpu"
        need_tensor(place, mapping)
        if mapping.device.type != "cpu":
            raise ValueError(f"{place} must be on the CPU, but is on {mapping.device}")
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

    def _no_gate(self, given: dict[str, Any], which: str = "") -> None:
        """Refuses a gate for experts without one."""
        s = self._settings
        for name, parameter in (("gate", PARAMETERS["gate"]), ("gate_bias", "gate_bias")):
            if not s.activation.gated and given.get(name) is not None:
                raise ValueError(
                    f"{s.where}: {parameter}{which} was given, but gated=False: the experts have "
                    "no gate; accepted: None"
                )

    def _matrices(
        self, name: str, matrices: Any, shape: tuple[int, int]
    ) -> list[tuple[str, WeightForm]]:
        """Names and forms of all experts' matrices; a single one for a tensor [E, N, K]."""
        s = self._settings
        is_tensor = isinstance(matrices, torch.Tensor)
        if not s.method.takes_quantised or (is_tensor and s.method.takes_dense):
            return [(name, self._dense(name, matrices, (s.num_experts, *shape)))]
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
            (place, self._matrix(place, matrix, shape))
            for place, matrix in zip(places, matrices, strict=True)
        ]

    def _matrix(self, name: str, matrix: Any, shape: tuple[int, int]) -> WeightForm:
        """The form that one expert's matrix has or gets."""
        s = self._settings
        is_quantised = isinstance(matrix, QuantisedMatrix)
        if not s.method.takes_dense or (is_quantised and s.method.takes_quantised):
            return check_matrix(f"{s.where}: {name}", matrix, s.method.formats, *shape)
        return self._dense(name, matrix, shape)

    def _dense(self, name: str, tensor: Any, shape: tuple[int, ...]) -> WeightForm:
        """The form that dense weights get."""
        method, place = self._settings.method, f"{self._settings.where}: {name}"
        if method.takes_quantised and not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{place} must be a tensor or a QuantisedMatrix, got {type(tensor).__name__}"
            )
        _need_shape(place, tensor, shape)
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{place} has dtype {tensor.dtype}; accepted: {DTYPE_NAMES}")
        return method.form or DENSE_FORM

    def _bias(
        self, name: str, given: dict[str, Any], shape: tuple[int, ...], which: str = ""
    ) -> None:
        tensor = given.get(name)
        if tensor is None:
            return
        place = f"{self._settings.where}: {name}{which}"
        _need_shape(place, tensor, shape)
        if not tensor.is_floating_point():
            raise ValueError(f"{place} has dtype {tensor.dtype}; accepted: float dtypes")

    def _common_form(self, matrices: Sequence[Sequence[tuple[str, WeightForm]]]) -> LayerForm:
        """The form of a layer whose matrices (`LayerSettings.matrices`) have these names and
        forms."""
        s = self._settings
        every = [each[0] for each in matrices]
        for (first, expected), each in zip(every, matrices, strict=True):
            for name, form in each:
                if form != expected:
                    raise ValueError(f"{s.where}: {name} is {form}, but {first} is {expected}")
        return LayerForm(*(form for _, form in [every[0]] * (3 - len(every)) + every))


def _need_shape(place: str, tensor: Any, shape: tuple[int, ...]) -> None:
    need_tensor(place, tensor)
    need_dense(place, tensor)
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{place} must be {list(shape)}, got {list(tensor.shape)}")
