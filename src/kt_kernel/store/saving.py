"""``cpu_save=True``: where a layer may be saved, and the saving."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..methods import LayerForm
from .layer_file import LayerSpec, check_layer
from .manifest import MANIFEST, Manifest, generator
from .writer import PackedLayer, PackedWriter, manifest_if_any, refuse_other

if TYPE_CHECKING:
    from ..settings import LayerSettings


def check_target(settings: LayerSettings, weights: Iterable[Any]) -> None:
    """Raises ValueError where the layer could not be saved, before it is packed.

    weights: what it was given, stacked or a list per matrix.
    """
    for matrix in (one for given in weights for one in given):
        if getattr(matrix, "order", None) is not None:
            raise ValueError(
                f"{settings.where}: columns in another order (act-order) cannot be saved; pass "
                "cpu_save=False"
            )
    check_layer(settings.layer_idx)
    folder = os.path.abspath(settings.weight_path)
    if found := manifest_if_any(folder):
        refuse_other(folder, _model(settings), found)


def check_source(settings: LayerSettings) -> None:
    """Raises ValueError where loading would have to write beside what it reads."""
    if not os.path.lexists(os.path.join(settings.weight_path, MANIFEST)):
        raise ValueError(
            f"{settings.where}: cpu_save=True writes to weight_path {settings.weight_path}, which "
            "is to be read here and is no packed directory; pass tensors to "
            "load_weights_from_tensors, or convert it with kt quant"
        )


def layer_spec(settings: LayerSettings, form: LayerForm, biases: tuple[str, ...]) -> LayerSpec:
    """What a file of the layer holds."""
    return LayerSpec(
        layer=settings.layer_idx,
        num_experts=settings.num_experts,
        hidden_size=settings.hidden_size,
        moe_intermediate_size=settings.moe_intermediate_size,
        form=form,
        biases=biases,
    )


def save_layer(
    settings: LayerSettings, form: LayerForm, core: Any, biases: dict[str, np.ndarray]
) -> None:
    """Writes a layer, whose compiled form has expert e in slot e, to ``weight_path``."""
    with PackedWriter(settings.weight_path, _model(settings), wait=True) as writer:
        writer.add(PackedLayer(layer_spec(settings, form, tuple(biases)), core, biases))


def _model(settings: LayerSettings) -> Manifest:
    return Manifest(
        settings.method.name, None, settings.hidden_size, generator(), settings.scale_search
    )
