"""`merge_adapter`: a LoRA adapter put into the weights of a 16- or 32-bit checkpoint."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..adapter.changes import (
    EXPERTS_IN_NAME,
    MATRIX_OF,
    LayerChange,
    changes_of,
    layer_number,
)
from ..adapter.files import Adapter, read_adapter
from ..checkpoint.quantization import read_quantization
from ..runtime.files import need_file, parse_object
from ..runtime.nested import NUMBERS_OF_EXPERTS, text_config
from ..runtime.tensors import DTYPE_NAMES, DTYPES

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"

_EXPERT = re.compile(EXPERTS_IN_NAME + r"\.(\d+)\.(\w+)\.weight$")
_FUSED = re.compile(EXPERTS_IN_NAME + r"\.(gate_up_proj|down_proj)(?:\.weight)?$")
# Families whose fused experts are [E, H, 2I] and [E, I, H], gate and up alternating.
_COLUMNS = ("gpt_oss",)


def merge_adapter(
    model_path: str | os.PathLike[str],
    adapter_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
) -> None:
    """Writes the model with the adapter in its weights, W + scaling * B A, rounded once.

    The result is a checkpoint like that of the model, in the same dtype, with its other files. To
    quantise it call ``kt quant`` afterwards. One file of the model is in memory at a time.

    Args:
        model_path: folder of a Hugging Face model in safetensors files, bf16, fp16 or fp32; experts
            one by one or in 3-D parameters.
        adapter_path: folder of a PEFT adapter, as `save_adapter` writes it in either layout.
        output_path: a folder that does not exist, or is empty.

    Raises:
        FileNotFoundError: no model or no adapter.
        ValueError: a quantised model, an adapter of another model, ``output_path`` is not empty.
            Nothing was written then.
        OSError: the result cannot be written.
    """
    model, output = os.fspath(model_path), os.fspath(output_path)
    adapter = read_adapter(adapter_path)
    merge = _Merge(model, adapter)
    merge.check()
    if os.path.isdir(output) and os.listdir(output):
        raise ValueError(f"{output}: not empty; give a new folder")
    os.makedirs(output, exist_ok=True)
    for name in os.listdir(model):
        path = os.path.join(model, name)
        if os.path.isfile(path) and not name.endswith((".safetensors", ".bin", ".pt", ".pth")):
            shutil.copy2(path, output)
    for file in merge.files:
        save_file(dict(merge.tensors(file)), os.path.join(output, file), {"format": "pt"})


class _Merge:
    def __init__(self, model: str, adapter: Adapter) -> None:
        self._model, self._adapter = model, adapter
        config = os.path.join(model, "config.json")
        need_file(config, "a model's configuration")
        with open(config, "rb") as file:
            self._config = parse_object(file.read(), f"{config}: ")
        if read_quantization(self._config, config).settings:
            raise ValueError(
                f"{config}: the model is quantised; merge into its 16-bit checkpoint and quantise "
                "that, with kt quant"
            )
        self._columns = self._config.get("model_type") in _COLUMNS
        experts, self._linear = changes_of(adapter)
        self._experts = self._places(experts)

    @property
    def files(self) -> list[str]:
        """Names of the model's files with tensors."""
        index = os.path.join(self._model, INDEX)
        if not os.path.exists(index):
            need_file(os.path.join(self._model, WHOLE), "a model in safetensors files")
            return [WHOLE]
        with open(index, "rb") as file:
            return sorted(set(parse_object(file.read(), f"{index}: ")["weight_map"].values()))

    def _places(self, layers: dict[str, LayerChange]) -> dict[str, LayerChange]:
        """What is added, by the module of the model's experts. Those of the adapter may be called
        otherwise, but a layer with several modules of experts (a draft head's layers are numbered
        again from 0) needs the adapter's own name."""
        experts: dict[str, set[int]] = {}
        for file in self.files:
            path = os.path.join(self._model, file)
            with safe_open(path, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    if found := _EXPERT.search(name):
                        experts.setdefault(found[1], set()).add(int(found[2]))
                    elif found := _FUSED.search(name):
                        shape = opened.get_slice(name).get_shape()
                        experts.setdefault(found[1], set()).update(range(shape[0]))
        places = {}
        for module, layer in layers.items():
            place, number = module, layer_number(module)
            if place not in experts:
                like = sorted(other for other in experts if layer_number(other) == number)
                if len(like) > 1:
                    raise ValueError(
                        f"{self._adapter.folder}: {module} could be any of {', '.join(like)} of "
                        "the model"
                    )
                place = like[0] if like else module
            if place in experts and (why := layer.misfit(len(experts[place]))):
                raise ValueError(
                    f"{self._adapter.folder}: {place} has {len(experts[place])} experts, but "
                    f"{why}; the adapter belongs to another model"
                )
            places[place] = layer
        return places

    def check(self) -> None:
        """ValueError unless every tensor of the adapter has its place, and every place its dtype
        and shape."""
        missing = set(self._linear) | set(self._experts)
        for file in self.files:
            path = os.path.join(self._model, file)
            with safe_open(path, "pt") as opened:
                for name in sorted(opened.keys()):
                    target = self._target(name)
                    if target is None:
                        continue
                    tensor = opened.get_slice(name)
                    self._check_place(path, name, tensor.get_dtype(), tensor.get_shape())
                    missing.discard(target)
        if missing:
            raise ValueError(
                f"{self._adapter.folder}: the model has no weights for {len(missing)} adapted "
                f"modules, such as {min(missing)}; the adapter belongs to another model"
            )

    def _check_place(self, path: str, name: str, dtype: str, shape: list[int]) -> None:
        if dtype not in ("BF16", "F16", "F32"):
            raise ValueError(f"{path}: {name} is {dtype}; accepted: {DTYPE_NAMES}")
        experts = shape[0] if _FUSED.search(name) else 1
        try:
            change = next(self._changes(name, experts), (0, None))[1]
        except (KeyError, RuntimeError) as error:
            raise ValueError(
                f"{self._adapter.folder}: nothing that fits {name} {shape} of the model ({error})"
            ) from None
        if change is not None and list(change.shape) != shape[-2:]:
            raise ValueError(
                f"{self._adapter.folder}: the adapter changes {list(change.shape)} weights where "
                f"{name} of the model is {shape}"
            )

    def tensors(self, file: str) -> Iterator[tuple[str, torch.Tensor]]:
        """A file's tensors by name, changed where the adapter says so."""
        with safe_open(os.path.join(self._model, file), "pt") as opened:
            for name in sorted(opened.keys()):
                tensor = opened.get_tensor(name)
                if self._target(name) is not None:
                    assert tensor.dtype in DTYPES
                    rows = tensor if tensor.dim() == 3 else tensor[None]
                    for row, change in self._changes(name, len(rows)):
                        rows[row] = (rows[row].float() + change).to(tensor.dtype)
                yield name, tensor

    def _target(self, name: str) -> str | None:
        """The adapted module that a tensor belongs to."""
        found = _EXPERT.search(name) or _FUSED.search(name)
        if found:
            return found[1] if found[1] in self._experts else None
        module = name.removesuffix(".weight")
        return module if module in self._linear else None

    def _changes(self, name: str, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(row, what is added to it) of a tensor; of a 2-D one row 0. Nothing for a matrix that the
        adapter leaves as it is."""
        if found := _EXPERT.search(name):
            experts = self._config_experts()
            layer = self._experts[found[1]]
            change = layer.matrix(MATRIX_OF[found[3]], int(found[2]), experts, self._columns)
            if change is not None:
                yield 0, change
        elif found := _FUSED.search(name):
            for expert in range(rows):
                change = self._experts[found[1]].parameter(found[2], expert, rows)
                if change is not None:
                    yield expert, change.T if self._columns else change
        else:
            yield 0, self._linear[name.removesuffix(".weight")].product()

    def _config_experts(self) -> int:
        config = text_config(self._config)
        for name in NUMBERS_OF_EXPERTS:
            if isinstance(config.get(name), int):
                return config[name]
        raise KeyError("config.json has no number of experts")
