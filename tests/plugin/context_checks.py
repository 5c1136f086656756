"""That `kt tune` knows how long a context the installed engine accepts, and which changes of a
configuration it reads from its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import Qwen3MoeConfig

from kt_kernel.tuning.arguments import changes_of
from kt_kernel.tuning.context import context_limit
from kt_kernel.tuning.shape import as_config

_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}
_CONTENTS: list[dict[str, Any]] = [
    {},
    {"seq_length": 9000},
    {"seq_length": 9000, "model_max_length": 5000},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "dynamic", "factor": 2.5}},
    {"rope_scaling": _LLAMA3},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}},
]


def check_context(engine: str, derive: Callable[[Any], int]) -> None:
    """derive: the engine's number for an object of transformers."""
    for content in _CONTENTS:
        written = {"max_position_embeddings": 4096} | content
        copied = {k: dict(v) if isinstance(v, dict) else v for k, v in written.items()}
        limit = context_limit(as_config(written), engine)
        assert limit is not None
        assert limit[0] == derive(Qwen3MoeConfig(**copied)), (engine, written, limit)


_WORDS = [
    [],
    ["--hf-overrides", '{"num_hidden_layers": 2}'],
    ['--hf-overrides={"a": 1}', "--enforce-eager", "--hf_overrides", '{"b": {"c": 2}}'],
    ["--hf-overrides.num_hidden_layers", "2", "--hf-overrides.text_config.hidden_size=64"],
    ["--hf_overrides.layers+", "a,b", "--hf-overrides.layers+=c", "--hf-overrides.name", "x.y"],
    ["--hf-overrides.max_position_embeddings", "16k", "--hf-overrides.other=2M"],
    ["--hf-overrides.text", '{"a": 1}', "--hf-overrides.text.b", "2", "--hf-overrides", "{}"],
]


def check_changes(parse: Callable[[list[str]], Any]) -> None:
    """parse: vLLM's object for words of its command line."""
    for words in _WORDS:
        assert changes_of("vllm", words) == parse(words), words
