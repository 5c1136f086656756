"""A LoRA adapter that is served: what --kt-expert-lora-path names, merged while weights load."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ..adapter.changes import LayerChange, changes_of
from ..adapter.files import CONFIG, WEIGHTS, read_adapter
from ..runtime.tensors import DTYPE_NAMES, DTYPES, on_cpu
from ..runtime.text import ranges
from ..weights.expert_tensors import MATRICES, matrix_shapes
from ..weights.methods import METHODS

FLAG = "--kt-expert-lora-path"
#: Methods that quantise by themselves, into which an adapter can be merged first.
MERGING_METHODS = tuple(name for name, method in METHODS.items() if not method.quantised)

_ANOTHER = "the adapter belongs to another model"
_NAMED = 4  # modules named in a message
_IN_LAYER = re.compile(r"^.*\blayers\.\d+\.")


class ExpertAdapter:
    """An adapter of experts, and nothing else, by layer number.

    Attributes:
        path: its folder.
        layers: what it adds, by layer number.
    """

    def __init__(
        self, path: str, layers: Mapping[int, LayerChange], config: Mapping[str, Any]
    ) -> None:
        self.path = path
        self.layers = layers
        self._some_layers = _limits_layers(config)

    def check_sizes(self, experts: int, hidden: int | None, inter: int | None) -> None:
        """Raises ValueError unless it fits layers of these sizes; None: a size is not known."""
        for layer, change in self.layers.items():
            if why := change.misfit(experts, hidden, inter):
                raise ValueError(
                    f"layer {layer}: the model has {experts} experts per layer, but {why}; "
                    f"{_ANOTHER}"
                )

    def check_layers(self, layers: Collection[int]) -> None:
        """Raises ValueError unless all of its layers are among these, which are the model's layers
        with experts, and all of these are adapted or its configuration names single layers."""
        have = ranges(sorted(layers), ", ")
        if extra := sorted(set(self.layers) - set(layers)):
            raise ValueError(
                f"it changes experts of layers {ranges(extra, ', ')}; the model's layers with "
                f"experts: {have}; {_ANOTHER}"
            )
        if (missing := sorted(set(layers) - set(self.layers))) and not self._some_layers:
            raise ValueError(
                f"it has no tensors for layers {ranges(missing, ', ')}; the model's layers with "
                f"experts: {have}; {_ANOTHER}, or {CONFIG} lacks layers_to_transform"
            )

    def check_values(self) -> None:
        """Raises ValueError for a value that is not finite. Reads all tensors."""
        for layer, change in self.layers.items():
            if not all(bool(tensor.isfinite().all()) for tensor in change.tensors()):
                raise ValueError(f"layer {layer}: a tensor has a NaN or infinite value")

    def describe(self) -> str:
        """For the log: the folder, and which layers are changed."""
        return f"adapter {self.path} merged into layers {ranges(sorted(self.layers))}"


def open_adapter(path: str) -> ExpertAdapter:
    """Opens the adapter in a folder. Its tensors are mapped, not read.

    Raises ValueError, one line without the path where the caller names it, for anything but a
    supported adapter of experts alone.
    """
    try:
        adapter = read_adapter(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = os.path.basename(error.filename or path)
        raise ValueError(
            f"no {missing}; expected a folder with {CONFIG} and {WEIGHTS}, as PEFT and "
            "kt_kernel.sft.save_adapter write them"
        ) from error
    changes, others = changes_of(adapter)
    if others:
        raise ValueError(_of_other_modules(others))
    if not changes:
        raise ValueError("it has no tensors of experts")
    layers: dict[int, LayerChange] = {}
    for module, change in changes.items():
        other = layers.setdefault(change.layer, change)
        if other is not change:
            raise ValueError(
                f"it changes two modules of experts in layer {change.layer}, {other.module} and "
                f"{module}; only those of the model itself can be served"
            )
    return ExpertAdapter(path, layers, adapter.config)


def _of_other_modules(names: Iterable[str]) -> str:
    parts = sorted({_IN_LAYER.sub("", name) for name in names})
    more = f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else ""
    return (
        f"it also changes modules other than experts ({', '.join(parts[:_NAMED])}{more}), which "
        "this option does not support; merge the whole adapter into the 16-bit model with "
        "kt_kernel.sft.merge_adapter, and serve the result without this option"
    )


def _limits_layers(config: Mapping[str, Any]) -> bool:
    """Whether an adapter's configuration may choose some of the layers: by their numbers."""
    if config.get("layers_to_transform") is not None:
        return True
    names: list[str] = []
    for key in ("target_modules", "target_parameters", "exclude_modules"):
        value = config.get(key) or ()
        names += [value] if isinstance(value, str) else map(str, value)
    return any(re.search(r"\b\d+\b|\[0-9", name) for name in names)


class LayerMerge:
    """Merges an adapter into the experts of one layer while they are loaded.

    Raises ValueError if it does not fit the layer. ``place`` begins the messages.
    """

    def __init__(
        self, place: str, change: LayerChange, experts: int, hidden: int, inter: int
    ) -> None:
        if why := change.misfit(experts, hidden, inter):
            raise ValueError(f"{place}: {FLAG}: {why}; {_ANOTHER}")
        self._place, self._change, self._experts = place, change, experts
        self._shapes = matrix_shapes(hidden, inter)
        self._merged: set[tuple[int, str]] = set()

    def merged(self, expert: int, which: str, matrix: torch.Tensor) -> torch.Tensor:
        """The matrix with what the adapter adds, float32 on the CPU; the matrix itself if the
        adapter leaves it as it is."""
        place = f"{self._place}, expert {expert}, {which}"
        if tuple(matrix.shape) != self._shapes[which] or matrix.dtype not in DTYPES:
            raise ValueError(
                f"{place}: {matrix.dtype} {list(matrix.shape)}; an adapter can be merged into "
                f"{list(self._shapes[which])} in {DTYPE_NAMES}"
            )
        self._merged.add((expert, which))
        change = self._change.matrix(which, expert, self._experts)
        return matrix if change is None else on_cpu(matrix, torch.float32) + change

    def check_complete(self, experts: Iterable[int]) -> None:
        """Raises ValueError unless all matrices of these experts were merged."""
        for expert in experts:
            for which in MATRICES:
                if (expert, which) not in self._merged:
                    raise ValueError(
                        f"{self._place}, expert {expert}, {which}: the engine loaded it in a way "
                        f"in which {FLAG} cannot be merged; merge the adapter into the model with "
                        "kt_kernel.sft.merge_adapter"
                    )
