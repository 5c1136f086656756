"""A checkpoint's quantisation according to config.json (quantization_config)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .header import TensorInfo

#: AutoRound's names for itself. Its packing_format names the format whose packing it uses.
AUTO_ROUND = ("auto-round", "intel/auto-round")

_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class Quantization:
    """file: the config.json, or None. settings: its quantization_config, or {}."""

    file: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str | None:
        name = self.settings.get("quant_method")
        return name if isinstance(name, str) else None

    def expect(self, info: TensorInfo, title: str, *names: str) -> None:
        """Raises ValueError if quant_method is set but not one of `names`: files and config
        contradict each other."""
        if self.name is not None and self.name not in names:
            raise ValueError(
                f"{info} is {title}, but {self.file} has quant_method {self.name!r}; expected"
                f" {' or '.join(names)}"
            )

    def expect_value(self, info: TensorInfo, keys: tuple[str, ...], *accepted: Any) -> None:
        """Raises ValueError if one of the settings has another value."""
        for key in keys:
            value = self.settings.get(key)
            if value is not None and (value not in accepted or isinstance(value, bool)):
                raise ValueError(
                    f"{info}: {self.file} has {key} {value!r}; accepted:"
                    f" {', '.join(map(str, accepted))}"
                )

    def weight_groups(self) -> Iterator[dict[str, Any]]:
        """Yields the settings for weights in each of compressed-tensors' config_groups."""
        groups = self.settings.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict):
                yield weights


def read_quantization(config: dict[str, Any] | None, file: str | None) -> Quantization:
    """Reads the settings of a config.json or of its text_config. An empty object counts as absent,
    because the settings may be in the other place."""
    for part in (config, (config or {}).get("text_config")):
        if not isinstance(part, dict):
            continue
        for key in _KEYS:
            if isinstance(part.get(key), dict) and part[key]:
                return Quantization(file, part[key])
    return Quantization(file)
