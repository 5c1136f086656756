"""Where a config.json has the configuration of the text model, and its number of experts."""

from __future__ import annotations

from typing import Any

#: Names of the number of routed experts per layer.
NUMBERS_OF_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
# Names of a configuration inside another one that lead to the text model's.
_TOWARDS_TEXT = ("thinker_config", "text_config", "language_config", "llm_config")


def text_path(config: dict[str, Any]) -> tuple[str, ...]:
    """The names that lead to the configuration of the text model; none for a text model."""
    for name in _TOWARDS_TEXT:
        if isinstance(inner := config.get(name), dict):
            return name, *text_path(inner)
    return ()


def at(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The configuration that a path leads to."""
    for name in path:
        config = config[name]
    return config


def parts_towards_text(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The configuration and those on the way to the text model's, which is the last one."""
    path = text_path(config)
    return [at(config, path[:length]) for length in range(len(path) + 1)]


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the text model; of a text model, its own."""
    return at(config, text_path(config))
