"""A checkpoint's quantisation according to config.json (quantization_config)."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from ..runtime.nested import parts_towards_text
from .header import TensorInfo

_KEYS = ("quantization_config", "compression_config")
# Settings of single modules: of AutoRound, by name or pattern; of GPTQModel, by pattern.
_BY_MODULE = ("extra_config", "dynamic")
# GPTQModel's marks of patterns: of modules that it quantises, and of those that it leaves alone.
_SIGN = re.compile(r"^[+-]:")
_SPECIAL = re.compile(r"[\\^$*+?{}\[\]|():]")


@dataclass(frozen=True)
class Quantization:
    """file: the config.json, or None. settings: its quantization_config, or {}.

    The tensors show what a matrix holds. Settings are used for what tensors do not show, and are
    compared with the tensors otherwise.
    """

    file: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str | None:
        name = self.settings.get("quant_method")
        return name if isinstance(name, str) else None

    def of(self, info: TensorInfo) -> dict[str, Any]:
        """The settings of a tensor's module, with those that are for single modules."""
        module = info.name.rpartition(".")[0]
        found = dict(self.settings)
        for key in _BY_MODULE:
            matching = [s for pattern, s in self._patterns[key] if pattern.match(module)]
            # GPTQModel uses the first of its patterns that matches.
            for settings in matching[:1] if key == "dynamic" else matching:
                found |= settings
            single = self.settings.get(key)
            own = single.get(module) if isinstance(single, dict) else None
            if isinstance(own, dict):
                found |= own
        return found

    @property
    def by_module(self) -> bool:
        """Whether there are settings of single modules."""
        return any(self.settings.get(key) for key in _BY_MODULE)

    @functools.cached_property
    def _patterns(self) -> dict[str, list[tuple[re.Pattern[str], dict[str, Any]]]]:
        """The settings for modules that match a pattern, in their order. Others have names, tens of
        thousands."""
        found: dict[str, list[tuple[re.Pattern[str], dict[str, Any]]]] = {}
        for key in _BY_MODULE:
            single = self.settings.get(key)
            found[key] = []
            for text, settings in single.items() if isinstance(single, dict) else ():
                if isinstance(settings, dict) and _SPECIAL.search(text):
                    with suppress(re.error):
                        found[key].append((re.compile(_SIGN.sub("", text)), settings))
        return found

    def expect_value(self, info: TensorInfo, keys: tuple[str, ...], *accepted: Any) -> None:
        """Raises ValueError if one of the settings of a tensor's module has another value."""
        settings = self.of(info)
        for key in keys:
            value = settings.get(key)
            if value is not None and (value not in accepted or isinstance(value, bool)):
                raise ValueError(
                    f"{info}: {self.file} has {key} {value!r}; accepted:"
                    f" {', '.join(map(str, accepted))}"
                )

    def group_sizes(self, info: TensorInfo) -> list[int]:
        """The group sizes that the settings have for a tensor's module."""
        found = [self.of(info).get("group_size")]
        found += [group.get("group_size") for group in self.weight_groups()]
        return [size for size in found if type(size) is int]

    def weight_groups(self) -> Iterator[dict[str, Any]]:
        """Yields the settings for weights in each of compressed-tensors' config_groups."""
        groups = self.settings.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            weights = group.get("weights") if isinstance(group, dict) else None
            if isinstance(weights, dict):
                yield weights


def read_quantization(config: dict[str, Any] | None, file: str | None) -> Quantization:
    """Reads the settings of a config.json, or of what leads to the text model's inside it. An empty
    object counts as absent, because the settings may be in the other place."""
    for part in parts_towards_text(config or {}):
        for key in _KEYS:
            if isinstance(part.get(key), dict) and part[key]:
                return Quantization(file, part[key])
    return Quantization(file)
