"""The configuration of a multimodal model's text model counts as the model's own."""

from __future__ import annotations

from typing import Any

import pytest

from kt_kernel.checkpoint.quantization import read_quantization
from kt_kernel.checkpoint.safetensors.families import model_type
from kt_kernel.runtime.nested import text_config, text_path

QUANTISED = {"quant_method": "gptq", "bits": 4}
TEXT = {"model_type": "nemotron_h", "quantization_config": QUANTISED}


@pytest.mark.parametrize(
    "path",
    [
        (),
        ("text_config",),
        ("llm_config",),
        ("language_config",),
        ("thinker_config", "text_config"),
    ],
)
def test_it_is_found_under_each_name(path: tuple[str, ...]) -> None:
    config: dict[str, Any] = TEXT
    for name in reversed(path):
        config = {name: config, "model_type": "unknown", "quantization_config": {}}
    assert text_path(config) == path
    assert text_config(config) == TEXT
    assert model_type(config) == "nemotron_h"
    assert read_quantization(config, "config.json").settings == QUANTISED


@pytest.mark.parametrize("inner", [None, "text", ["text"], 7])
def test_what_is_no_configuration_is_left_alone(inner: object) -> None:
    config = {"model_type": "qwen3_moe", "text_config": inner, "llm_config": inner}
    assert text_path(config) == ()
    assert model_type(config) == "qwen3_moe"
    assert read_quantization(config, "config.json").settings == {}
