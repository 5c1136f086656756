"""The longest context for which an engine serves a model, by the engine's own rule.

Each engine compares what a user asks for with a number that it derives from the model's
configuration, and refuses more while it starts. The rules differ where rotary embeddings are
scaled, so each is repeated here: that of vLLM 0.32.0 (config/model.py) and that of SGLang 0.5.23
(utils/hf_transformers/common.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..serving.model_config import size_of
from .arguments import OVERRIDES_FLAG

# Names of the most tokens in a configuration. vLLM takes the smallest number, SGLang the first.
_OF_VLLM = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_OF_SGLANG = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
)
# Kinds of rotary embeddings whose factor vLLM does not apply to the number of a configuration.
_SCALED_ALREADY = (
    "su",
    "longrope",
    "llama3",
    "mrope",
    "yarn",
    "deepseek_yarn",
    "deepseek_llama_scaling",
)
# With these, transformers adds the original number to the parameters, and SGLang takes it for a
# sign that the configuration's number is the scaled one.
_WITH_ORIGINAL = "llama3", "yarn", "longrope"
# Variables with which engines accept more, with a warning.
_ALLOW = {
    "vllm": "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    "sglang": "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
}


def context_limit(config: Any, engine: str) -> tuple[int, str] | None:
    """(Most tokens of a request, where the configuration says so); None: the engine accepts any
    number, or the configuration leaves it to the engine.

    Args:
        config: see `shape.as_config`.
        engine: vllm or sglang.
    """
    if os.environ.get(_ALLOW[engine], "").strip().lower() in ("1", "true", "yes", "y"):
        return None
    return _vllm(config) if engine == "vllm" else _sglang(config)


def how_to_allow(engine: str) -> str:
    """What makes an engine accept a longer context, in words."""
    changes = f'--engine-args "{OVERRIDES_FLAG[engine]} ..." changes that'
    return f"{changes}, and {_ALLOW[engine]}=1 ignores it"


def leave_unknown(changes: Mapping[str, Any]) -> bool:
    """Whether an engine derives a limit that is not known here: from rotary embeddings that the
    user changes, which each engine joins with those of config.json in a way of its own."""
    return any(
        name.startswith("rope") or isinstance(value, Mapping) and leave_unknown(value)
        for name, value in changes.items()
    )


def _vllm(config: Any) -> tuple[int, str] | None:
    found = {name: most for name in _OF_VLLM if (most := size_of(config, name))}
    if most := size_of(config, "model_max_length"):
        found = {"model_max_length": most}
    if not found:
        return None
    name = min(found, key=lambda name: found[name])
    factor: Any = 1
    if "gemma3" not in str(getattr(config, "model_type", "")):
        for rope in _ropes(config):
            if _kind(rope) not in _SCALED_ALREADY:
                factor = rope.get("factor", factor)
    return _scaled(found[name], name, factor)


def _sglang(config: Any) -> tuple[int, str] | None:
    rope: Mapping[str, Any] = next(iter(_ropes(config, nested=False)), {})
    factor = rope.get("factor", 1)
    if "original_max_position_embeddings" in rope or _kind(rope) in _WITH_ORIGINAL:
        factor = 1
    for name in _OF_SGLANG:
        if most := size_of(config, name):
            return _scaled(most, name, factor)
    return None  # the class of the configuration has a number, or SGLang takes 2048


def _scaled(most: int, name: str, factor: Any) -> tuple[int, str]:
    said = f"{name} {most}"
    if not isinstance(factor, int | float) or factor in (0, 1):
        return most, said
    return int(most * factor), f"{said}, scaled by {factor:g}"


def _ropes(config: Any, nested: bool = True) -> list[Mapping[str, Any]]:
    """The parameters of rotary embeddings: one mapping, or one for each kind of layers."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(found, Mapping):
        return []
    inner = [value for value in found.values() if isinstance(value, Mapping)]
    return inner if inner and nested else [found]


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")
