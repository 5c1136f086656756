"""The longest context of a model, as each engine derives it: worked out by hand from the engines'
rules, and compared with the engines' own functions by `tests/plugin`'s contract checks."""

from __future__ import annotations

from typing import Any

import pytest

from kt_kernel.tuning.context import context_limit, leave_unknown
from kt_kernel.tuning.shape import as_config

POSITIONS = "max_position_embeddings"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("content", "vllm", "sglang"),
    [
        ({}, None, None),
        ({POSITIONS: 4096}, 4096, 4096),
        ({"text_config": {POSITIONS: 7}}, 7, 7),
        # Of several numbers, vLLM takes the smallest, or model_max_length; SGLang the first.
        ({POSITIONS: 4096, "seq_length": 9000}, 4096, 9000),
        ({POSITIONS: 4096, "seq_length": 9000, "model_max_length": 5000}, 5000, 9000),
        ({"n_positions": 512}, 512, None),
        # Scaling.
        ({POSITIONS: 4096, "rope_scaling": {"type": "linear", "factor": 4}}, 16384, 16384),
        ({POSITIONS: 4096, "rope_scaling": {"rope_type": "dynamic", "factor": 2.5}}, 10240, 10240),
        ({POSITIONS: 9, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, 9, 9),
        ({POSITIONS: 9, "rope_scaling": {"rope_type": "default"}}, 9, 9),
        ({POSITIONS: 9, "rope_scaling": {"rope_type": "longrope", "factor": 8}}, 9, 9),
        # The number of a model with YaRN is already the scaled one, in both engines.
        ({POSITIONS: 40960, "rope_parameters": YARN}, 40960, 40960),
        ({POSITIONS: 163840, "rope_scaling": {"type": "yarn", "factor": 40}}, 163840, 163840),
        (
            {POSITIONS: 8, "rope_scaling": {"rope_type": "deepseek_yarn", "factor": 40}},
            8,
            320,
        ),
        (
            {
                POSITIONS: 100,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            800,
            100,
        ),
        (
            {
                POSITIONS: 100,
                "model_type": "gemma3_text",
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            100,
            800,
        ),
    ],
)
def test_limits(content: dict[str, Any], vllm: int | None, sglang: int) -> None:
    config = as_config(content)
    found = context_limit(config, "vllm")
    assert (found and found[0]) == vllm
    limit = context_limit(config, "sglang")
    assert (limit and limit[0]) == sglang


def test_the_place_is_named() -> None:
    config = as_config({POSITIONS: 4096, "rope_scaling": {"type": "linear", "factor": 2.5}})
    assert context_limit(config, "vllm") == (10240, f"{POSITIONS} 4096, scaled by 2.5")


def test_users_may_allow_more(monkeypatch: pytest.MonkeyPatch) -> None:
    config = as_config({POSITIONS: 4096})
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "0")
    assert context_limit(config, "vllm") is None
    assert context_limit(config, "sglang") is not None


def test_changes_that_each_engine_joins_in_its_own_way() -> None:
    for changes in ({"rope_scaling": {}}, {"text_config": {"rope_parameters": {"factor": 2}}}):
        assert leave_unknown(changes)
    assert not leave_unknown({POSITIONS: 1, "text_config": {POSITIONS: 2}})
