"""What a configuration says of its experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from kt_kernel.serving.model_config import (
    expert_sizes,
    may_be_streamed,
    num_experts,
    plain_swiglu,
)
from kt_kernel.serving.option_table import OptionError


@pytest.mark.parametrize(
    ("name", "given", "may"),
    [
        ("Qwen3MoeConfig", {}, True),
        ("DeepseekV3Config", {}, True),
        ("MixtralConfig", {"hidden_act": "gelu"}, False),
        ("Gemma4TextConfig", {}, False),  # hidden_activation
        ("NemotronHConfig", {}, False),  # mlp_hidden_act: experts without a gate
        ("GptOssConfig", {}, True),  # with its swiglu_limit
        ("MiniMaxM3VLTextConfig", {}, False),  # swiglu_alpha and swiglu_limit
        ("Step3p7TextConfig", {}, True),
        ("Step3p7TextConfig", {"swiglu_limits": [0.0] * 45}, True),
        ("Step3p7TextConfig", {"swiglu_limits": [0.0] * 44 + [7.0]}, False),
        ("LagunaConfig", {}, True),
        ("LagunaConfig", {"moe_apply_router_weight_on_input": True}, False),
        ("Llama4TextConfig", {}, False),  # router weights on the input
    ],
)
def test_which_activations_may_be_streamed(name: str, given: dict[str, Any], may: bool) -> None:
    config = getattr(transformers, name)()
    for setting, value in given.items():
        setattr(config, setting, value)
    assert may_be_streamed(config) == may
    assert plain_swiglu(config) == (may and name != "GptOssConfig")


@pytest.mark.parametrize(
    "name", ["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"]
)
def test_names_of_the_number_of_experts(name: str) -> None:
    """The last one is that of Step-3, Step-3.5 and Aria, and of Ernie 4.5 VL, for text and for
    images."""
    assert num_experts(SimpleNamespace(**{name: 48})) == 48
    assert num_experts(SimpleNamespace(**{name: [48, 48]})) == 48
    for numbers in ([], 0, None, [None, None]):
        with pytest.raises(OptionError, match="its configuration has no number of experts"):
            num_experts(SimpleNamespace(**{name: numbers}))


PUZZLE = [{"block_type": "moe", "n_routed_experts": n} for n in (8, 64, 9)] + [{}]


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (
            transformers.DbrxConfig(ffn_config={"moe_num_experts": 16}),
            "ffn_config.moe_num_experts 16",
        ),
        (SimpleNamespace(ffn_config={"moe_num_experts": 16}), "ffn_config.moe_num_experts 16"),
        (SimpleNamespace(block_configs=PUZZLE), "block_configs.n_routed_experts 8-9,64"),
        (SimpleNamespace(moe_num_experts=[48, 64]), "moe_num_experts 48,64"),
    ],
)
def test_other_numbers_of_experts(config: Any, found: str) -> None:
    """In a part of the configuration, or not one for the whole model. No such class is served."""
    config.architectures = ["SomeForCausalLM"]
    with pytest.raises(OptionError) as caught:
        num_experts(config)
    assert str(caught.value) == (
        "model class SomeForCausalLM is not supported: kt-moe reads one number of experts for the "
        "whole model (num_experts, n_routed_experts, num_local_experts, moe_num_experts), and this "
        f"configuration has {found}"
    )


@pytest.mark.parametrize("name", ["moe_latent_size", "routed_expert_hidden_size"])
def test_experts_in_a_smaller_space(name: str) -> None:
    """Nemotron-H's and Kimi-K3's have projections before and after them."""
    config = SimpleNamespace(hidden_size=64, moe_intermediate_size=96, **{name: 32})
    assert expert_sizes(config) == (32, 96)
