"""What a configuration says of its experts' activation, with the classes of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from kt_kernel.serving.model_config import has_plain_silu


@pytest.mark.parametrize(
    ("name", "given", "plain"),
    [
        ("Qwen3MoeConfig", {}, True),
        ("DeepseekV3Config", {}, True),
        ("MixtralConfig", {"hidden_act": "gelu"}, False),
        ("Gemma4TextConfig", {}, False),  # hidden_activation
        ("NemotronHConfig", {}, False),  # mlp_hidden_act: experts without a gate
        ("GptOssConfig", {}, False),  # swiglu_limit
        ("MiniMaxM3VLTextConfig", {}, False),  # swiglu_alpha and swiglu_limit
        ("Step3p7TextConfig", {}, True),
        ("Step3p7TextConfig", {"swiglu_limits": [0.0] * 45}, True),
        ("Step3p7TextConfig", {"swiglu_limits": [0.0] * 44 + [7.0]}, False),
        ("LagunaConfig", {}, True),
        ("LagunaConfig", {"moe_apply_router_weight_on_input": True}, False),
        ("Llama4TextConfig", {}, False),  # router weights on the input
    ],
)
def test_which_activations_are_plain_silu(name: str, given: dict[str, Any], plain: bool) -> None:
    config = getattr(transformers, name)()
    for setting, value in given.items():
        setattr(config, setting, value)
    assert has_plain_silu(config) == plain
