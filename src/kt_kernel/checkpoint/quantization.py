"""A checkpoint's quantisation according to config.json (quantization_config)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .header import TensorInfo

#: What AutoRound calls itself; its packing_format tells in which other format's way it packs.
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
        """ValueError if quant_method is there and none of `names`: files and config disagree."""
        if self.name is not None and self.name not in names:
            raise ValueError(
                f"{info} is {title}, but {self.file} has quant_method {self.name!r}; expected"
                f" {' or '.join(names)}"
            )

    def expect_value(self, info: TensorInfo, keys: tuple[str, ...], *accepted: Any) -> None:
        """ValueError if one of the settings has another value."""
        for key in keys:
            value = self.settings.get(key)
            if value is not None and (value not in accepted or isinstance(value, bool)):
                raise ValueError(
                    f"{info}: {self.file} has {key} {value!r}; accepted:"
                    f" {', '.join(map(str, accepted))}"
                )

    def weight_groups(self) -> Iterator[dict[str, Any]]:
        """The weights' settings in each of compressed-tensors' config_groups."""
        groups = self.settings.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict):
                yield weights


def read_quantization(config: dict[str, Any] | None, file: str | None) -> Quantization:
    """From a config.json, or from its text_config. An empty object counts as absent, because the
    settings may be in another place."""
    for part in (config, (config or {}).get("text_config")):
        if not isinstance(part, dict):
            continue
        for key in _KEYS:
            if isinstance(part.get(key), dict) and part[key]:
                return Quantization(file, part[key])
    return Quantization(file)
