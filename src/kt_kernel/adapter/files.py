"""The two files of a PEFT adapter: reading, checking and writing them."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file, save

from ..runtime.files import need_file, parse_object, replace_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

#: What the names of a model's modules begin with in an adapter.
PREFIX = "base_model.model."

# Settings with which W + scaling * B A is not the adapted weight, and the values that turn them
# off. PEFT writes an empty value as null.
_OFF: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False,),
    "layer_replication": (),
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "kasa_config": (),
    "monteclora_config": (),
}
# Initialisations that also change the base weights, which an adapter does not contain.
_CHANGES_BASE = re.compile(r"pissa|corda|olora|loftq|lora_ga")


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
        config: the content of adapter_config.json.
        tensors: by name, `PREFIX` included. They are mapped from the file.
    """

    folder: str
    config: Mapping[str, Any]
    tensors: dict[str, torch.Tensor]

    def rank(self, module: str) -> int:
        """The rank of a module or parameter according to the configuration."""
        return int(_pattern_value(self.config, "rank_pattern", "r", module))

    def scaling(self, module: str, rank: float) -> float:
        """What the product of B and A of a module or parameter is multiplied by: alpha / rank, or
        alpha / sqrt(rank) with ``use_rslora``."""
        alpha = _pattern_value(self.config, "alpha_pattern", "lora_alpha", module)
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def _pattern_value(config: Mapping[str, Any], pattern: str, default: str, module: str) -> float:
    """A setting of a module: of the first expression that matches the end of its name, else the
    default."""
    for expression, value in (config.get(pattern) or {}).items():
        if re.match(rf"(.*\.)?({expression})$", module):
            return value
    return config[default]


def read_adapter(folder: str | os.PathLike[str]) -> Adapter:
    """Reads an adapter and checks its settings.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: it is not a LoRA adapter, or has a setting that is not supported; names the
            file, the value and what is accepted.
    """
    folder = os.fspath(folder)
    path, weights = os.path.join(folder, CONFIG), os.path.join(folder, WEIGHTS)
    need_file(path, "a PEFT adapter's configuration")
    with open(path, "rb") as file:
        config = parse_object(file.read(), f"{path}: ")
    check_config(path, config)
    need_file(weights, "a PEFT adapter's tensors")
    try:
        tensors = load_file(weights)
    except Exception as error:
        raise ValueError(f"{weights}: {error}") from error
    return Adapter(folder, config, tensors)


def check_config(path: str, config: Mapping[str, Any]) -> None:
    """Raises ValueError, which begins with ``path``, for settings that are not supported."""
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type is {config.get('peft_type')!r}; supported: 'LORA'")
    for name, off in _OFF.items():
        value = config.get(name)
        if value not in (None, *off):
            accepted = " or ".join(json.dumps(each) for each in (*off, None))
            raise ValueError(
                f"{path}: {name} is {json.dumps(value)}, which is not supported; accepted: "
                f"{accepted}"
            )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and _CHANGES_BASE.match(start.lower()):
        raise ValueError(
            f"{path}: init_lora_weights is {start!r}, which also changed the base weights; save "
            "the adapter with PEFT's path_initial_model_for_weight_conversion"
        )
    _check_number(path, "r", config.get("r"), least=1)
    _check_number(path, "lora_alpha", config.get("lora_alpha"))
    for name, least in (("rank_pattern", 1), ("alpha_pattern", -math.inf)):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict):
            raise ValueError(f"{path}: {name} is {pattern!r}; expected an object")
        for expression, value in pattern.items():
            _check_number(path, f"{name}[{expression!r}]", value, least)
            try:
                re.compile(rf"(.*\.)?({expression})$")
            except re.error as error:
                raise ValueError(
                    f"{path}: {name} has {expression!r}, which is no regular expression: {error}"
                ) from None


def _check_number(path: str, name: str, value: Any, least: float = -math.inf) -> None:
    """Raises ValueError for anything but a finite number, or an integer if ``least`` is finite."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{path}: {name} is {value!r}; expected a number")
    anything = math.isinf(least)
    if not math.isfinite(value) or (not anything and (value < least or value != int(value))):
        kind = "a finite number" if anything else f"an integer of at least {least}"
        raise ValueError(f"{path}: {name} is {value!r}; expected {kind}")


def write_adapter(
    folder: str | os.PathLike[str], config: Mapping[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """Writes both files, the tensors first; each is there whole or as it was. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    # The order of patterns counts, so it stays.
    text = json.dumps({k: _plain(config[k]) for k in sorted(config)}, indent=2)
    replace_file(os.path.join(folder, WEIGHTS), save(tensors, metadata={"format": "pt"}))
    replace_file(os.path.join(folder, CONFIG), text)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else value
