"""``cpu_save=True``: checks where a layer can be saved, and saves it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...runtime.files import named, nearest_existing
from ..formats import LayerForm
from .layer_file import LayerSpec, check_layer
from .manifest import PACKED_COPY, Manifest, generator
from .writer import PackedLayer, PackedWriter, manifest_if_any, refuse_other

if TYPE_CHECKING:
    from ...moe.settings import LayerSettings


def check_target(settings: LayerSettings, weights: Iterable[Any]) -> None:
    """Raises ValueError or OSError if the layer cannot be saved to ``weight_path``. Called before
    packing.

    weights: the given weights, stacked or a list per matrix.
    """
    assert settings.weight_path is not None  # cpu_save needs one, see `check_settings`
    refuse_order(settings, (one for given in weights for one in given))
    check_layer(settings.layer_idx)
    folder = os.path.abspath(settings.weight_path)
    if found := manifest_if_any(folder):
        refuse_other(folder, _model(settings), found)
    check_folder(folder)


def refuse_order(settings: LayerSettings, matrices: Iterable[Any]) -> None:
    """Raises ValueError for a matrix with a column order, which packed files cannot hold."""
    if any(getattr(matrix, "order", None) is not None for matrix in matrices):
        raise ValueError(
            f"{settings.where}: weights with a column order (act-order) cannot be saved; pass "
            "cpu_save=False"
        )


def copy_folder(checkpoint: str) -> str:
    """The folder of the packed copy of a checkpoint (a file or a folder)."""
    folder = checkpoint if os.path.isdir(checkpoint) else os.path.dirname(checkpoint)
    return os.path.join(os.path.abspath(folder), PACKED_COPY)


def has_copy(folder: str, model: Manifest, layer: int) -> bool:
    """Whether the packed copy of a checkpoint has a layer. False if there is no copy.

    model: the content of a new manifest. An existing layer may be from another version of kt-moe.

    Raises ValueError, naming the folder, for a copy of something else, and what `manifest_if_any`
    raises.
    """
    check_layer(layer)
    found = manifest_if_any(folder)
    if found is None:
        return False
    there = layer in found.layers
    if there:
        model = replace(model, generator=found.generator, expected=found.expected)
    if different := model.differences(found):
        raise ValueError(
            f"{folder} holds a packed copy of something else ({'; '.join(different)}); delete the "
            "folder, or pass cpu_save=False"
        )
    return there


def check_folder(folder: str) -> None:
    """Raises OSError, naming the folder, if files cannot be created in it. It need not exist, and
    nothing is left behind."""
    with named(folder), tempfile.TemporaryFile(dir=nearest_existing(folder)):
        pass


def packed_layer(
    settings: LayerSettings, form: LayerForm, core: Any, biases: dict[str, np.ndarray]
) -> PackedLayer:
    """A layer to be written. core: the compiled layer, with expert e in slot e. biases: float32 [E,
    n]."""
    spec = LayerSpec(
        layer=settings.layer_idx,
        num_experts=settings.num_experts,
        hidden_size=settings.hidden_size,
        moe_intermediate_size=settings.moe_intermediate_size,
        form=form,
        biases=tuple(biases),
    )
    return PackedLayer(spec, core, biases)


def save(folder: str | os.PathLike[str], model: Manifest, layer: PackedLayer) -> None:
    """Adds a layer to a packed directory, which is created if needed."""
    with PackedWriter(folder, model, wait=True) as writer:
        writer.add(layer)


def save_layer(settings: LayerSettings, layer: PackedLayer) -> None:
    """Adds a layer whose weights came as tensors to ``weight_path``."""
    assert settings.weight_path is not None
    save(settings.weight_path, _model(settings), layer)


def _model(settings: LayerSettings) -> Manifest:
    return Manifest(
        settings.method.name, None, settings.hidden_size, generator(), settings.scale_search
    )
