"""Layers with all experts on the CPU in logical order, as in packed directories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..checkpoint import open_checkpoint
from ..checkpoint.packed import PackedCheckpoint
from ..runtime.tensors import on_cpu
from ..weights.expert_tensors import BIASES
from ..weights.loading import Expert, LoadRecord
from ..weights.store import saving
from ..weights.store.manifest import Manifest, generator
from ..weights.store.writer import PackedLayer
from .placement import Placement
from .settings import LayerSettings
from .weight_checks import PARAMETERS
from .wrapper import BaseMoEWrapper, naming_path


class WholeLayer(BaseMoEWrapper):
    """A layer that is loaded in order to be written to disk.

    Keeps the experts' biases, which the compiled layer does not return.
    """

    def __init__(self, settings: LayerSettings) -> None:
        nothing = Placement.first(settings.num_experts, 0)
        super().__init__(replace(settings, placement=nothing, cpu_save=False))
        self._biases: dict[str, np.ndarray] = {}

    @property
    def _logical_order(self) -> torch.Tensor:
        return torch.arange(self.num_experts, device="cpu")

    def load_from_files(self) -> PackedLayer:
        """The layer from ``weight_path``. Raises what ``load_weights`` raises."""
        self.load_weights(self._logical_order)
        return self._packed()

    def load_from_tensors(self, given: dict[str, Any]) -> PackedLayer:
        """The layer from tensors, by their names in `ExpertTensors`. Raises what
        ``load_weights_from_tensors`` raises."""
        arguments = {PARAMETERS.get(name, name): value for name, value in given.items()}
        self.load_weights_from_tensors(**arguments, physical_to_logical_map_cpu=self._logical_order)
        return self._packed()

    def _packed(self) -> PackedLayer:
        assert self._form is not None  # it is loaded
        biases = {name: self._biases[name] for name in BIASES if name in self._biases}
        return saving.packed_layer(self._settings, self._form, self._core, biases)

    def _pack(self, core: Any, experts: Sequence[tuple[int, Expert]]) -> None:
        saving.refuse_order(self._settings, (part for _, e in experts for part in e.values()))
        super()._pack(core, experts)
        for slot, expert in experts:
            for name in BIASES:
                if (bias := expert.get(name)) is not None:
                    rows = self._biases.get(name)
                    if rows is None:
                        rows = np.zeros((self.num_experts, *bias.shape), np.float32)
                        self._biases[name] = rows
                    rows[slot] = on_cpu(bias, torch.float32).numpy()


def packed_copy(settings: LayerSettings) -> tuple[str, LoadRecord | None]:
    """The packed directory to load the layer of ``weight_path`` from, and the cost of making it.

    That is ``weight_path`` itself if it is one, else its subfolder ``kt-packed``, to which the
    layer is added if it is missing. An existing layer is used only if it was made from the same
    checkpoint for the same method.

    Raises what ``BaseMoEWrapper.load_weights`` raises.
    """
    s = settings
    assert s.weight_path is not None  # otherwise there is nothing to read
    with naming_path(s.where, s.weight_path):
        checkpoint = open_checkpoint(s.weight_path)
        if isinstance(checkpoint, PackedCheckpoint):
            return checkpoint.path, None
        folder = saving.copy_folder(checkpoint.path)
        model = Manifest(
            method=s.method.name,
            model_type=checkpoint.model_type,
            hidden_size=s.hidden_size,
            generator=generator(),
            scale_search=s.scale_search,
            source=checkpoint.fingerprint,
        )
        if saving.has_copy(folder, model, s.layer_idx):
            return folder, None
        saving.check_folder(folder)
    whole = WholeLayer(s)
    layer = whole.load_from_files()
    if changed := checkpoint.changed(folders=False):
        raise ValueError(f"{s.where}: {changed}: changed while it was read; load the layer again")
    saving.save(folder, model, layer)
    return folder, whole.load_record
