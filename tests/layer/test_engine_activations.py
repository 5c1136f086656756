"""Activations as engines describe them, against their own definitions."""

from __future__ import annotations

from typing import Any

import pytest

from kt_kernel.moe.activation import ExpertActivation
from kt_kernel.serving.activations import SILU, activation_of

GPT_OSS = ExpertActivation(swiglu_limit=7.0, swiglu_alpha=1.702)
SITU = {"situ_beta": 4.0, "situ_linear_beta": 25.0}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("silu", {}, SILU),
        ("silu", {"alpha": 1.0, "beta": 0.0}, SILU),
        ("silu", {"limit": 10.0}, ExpertActivation(swiglu_limit=10.0)),  # DeepSeek-V4
        ("silu", {"limit": 7.0, "alpha": 1.702, "beta": 1.0}, GPT_OSS),
        ("swigluoai", {}, GPT_OSS),
        # MiniMax-M3
        ("swigluoai_uninterleave", {"limit": 7.0, "alpha": 1.702, "beta": 1.0}, GPT_OSS),
        ("swigluoai_uninterleave", {"limit": 7.0}, ExpertActivation(swiglu_limit=7.0)),
        ("gelu", {}, ExpertActivation("gelu")),
        ("gelu_pytorch_tanh", {}, ExpertActivation("gelu_tanh")),
        ("relu2_no_mul", {}, ExpertActivation("relu2", gated=False)),  # Nemotron-H in vLLM
        ("relu2", {"gated": False}, ExpertActivation("relu2", gated=False)),  # and in SGLang
        ("silu_no_mul", {}, ExpertActivation(gated=False)),
        ("situ", SITU, ExpertActivation("situ", **SITU)),  # Kimi-K3
        ("swiglustep", {"limit": 7.0}, ExpertActivation("swiglustep", swiglu_limit=7.0)),
        (
            "silu",
            {"router_weight_on_input": True},  # Llama-4
            ExpertActivation(router_weight_on_input=True),
        ),
    ],
)
def test_settings(name: str, given: dict[str, Any], expected: ExpertActivation) -> None:
    assert activation_of("layer 0", name, **given) == expected


@pytest.mark.parametrize(
    ("name", "given", "problem"),
    [
        ("mish", {}, "activation 'mish' is"),
        ("silu", {"limit": 0.0}, "a SwiGLU limit of 0.0 is"),  # it would clamp everything to 0
        ("silu", {"limit": -1.0}, "a SwiGLU limit of -1.0 is"),
        ("silu", {"alpha": 1.702}, "a SwiGLU alpha of 1.702 with a beta of None is"),
        ("silu", {"beta": 1.0}, "a SwiGLU alpha of None with a beta of 1.0 is"),
        ("swigluoai", {"beta": 0.5}, "a SwiGLU alpha of 1.702 with a beta of 0.5 is"),
        ("gelu", {"limit": 7.0}, "swiglu_limit=7 with activation='gelu', gated=True; accepted:"),
        ("situ", {"gated": False}, "gated=False with activation='situ'; accepted: True;"),
        ("silu", {"situ_beta": 4.0}, "situ_beta=4 with activation='silu', gated=True; accepted:"),
    ],
)
def test_refused(name: str, given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^layer 0: {problem}.*not supported with kt options"):
        activation_of("layer 0", name, **given)
