"""The two files of a PEFT adapter: reading and writing them."""

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

from ..runtime.files import Replacement, need_file, parse_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

#: What the names of a model's modules begin with in an adapter.
PREFIX = "base_model.model."


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter.

    Attributes:
        config: as adapter_config.json has it.
        tensors: by name, `PREFIX` included.
    """

    folder: str
    config: Mapping[str, Any]
    tensors: dict[str, torch.Tensor]

    def scaling(self, module: str, rank: float) -> float:
        """What the product of B and A of a module or parameter is multiplied by: alpha / rank, or
        alpha / sqrt(rank) with ``use_rslora``."""
        alpha = pattern_value(self.config, "alpha_pattern", "lora_alpha", module)
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)


def pattern_value(config: Mapping[str, Any], pattern: str, default: str, module: str) -> float:
    """A setting of a module: of the first expression that matches the end of its name, else the
    default."""
    for expression, value in (config.get(pattern) or {}).items():
        if re.match(rf"(.*\.)?({expression})$", module):
            return value
    return config[default]


def read_adapter(folder: str | os.PathLike[str]) -> Adapter:
    """Raises FileNotFoundError, or ValueError naming the file, for what is no LoRA adapter."""
    folder = os.fspath(folder)
    path, weights = os.path.join(folder, CONFIG), os.path.join(folder, WEIGHTS)
    need_file(path, "a PEFT adapter's configuration")
    with open(path, "rb") as file:
        config = parse_object(file.read(), f"{path}: ")
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type is {config.get('peft_type')!r}; supported: 'LORA'")
    if config.get("use_dora") or (config.get("bias") or "none") != "none":
        raise ValueError(f"{path}: use_dora and bias are not supported")
    missing = [
        name for name in ("r", "lora_alpha") if not isinstance(config.get(name), int | float)
    ]
    if missing:
        raise ValueError(f"{path}: {missing[0]} is missing or no number")
    need_file(weights, "a PEFT adapter's tensors")
    try:
        tensors = load_file(weights)
    except Exception as error:
        raise ValueError(f"{weights}: {error}") from error
    return Adapter(folder, config, tensors)


def write_adapter(
    folder: str | os.PathLike[str], config: Mapping[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """Writes both files, the tensors first; each is there whole or as it was. Raises OSError."""
    os.makedirs(folder, exist_ok=True)
    text = json.dumps({k: _plain(v) for k, v in config.items()}, indent=2, sort_keys=True)
    contents = (WEIGHTS, save(tensors, metadata={"format": "pt"})), (CONFIG, text.encode())
    for name, data in contents:
        with Replacement(os.path.join(os.fspath(folder), name)) as new:
            new.write(data)
            new.commit()


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else value
