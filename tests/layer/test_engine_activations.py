"""Activations as engines describe them, against their own definitions."""

from __future__ import annotations

from typing import Any

import pytest

from kt_kernel.serving.activations import SILU, Swiglu, swiglu_of


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("silu",), SILU),
        (("silu", None, 1.0, 0.0), SILU),
        (("silu", 10.0), Swiglu(10.0)),  # DeepSeek-V4
        (("silu", 7.0, 1.702, 1.0), Swiglu(7.0, 1.702)),
        (("swigluoai",), Swiglu(7.0, 1.702)),  # gpt-oss
        (("swigluoai_uninterleave", 7.0, 1.702, 1.0), Swiglu(7.0, 1.702)),  # MiniMax-M3
        (("swigluoai_uninterleave", 7.0), Swiglu(7.0)),
    ],
)
def test_settings(given: tuple[Any, ...], expected: Swiglu) -> None:
    assert swiglu_of("layer 0", *given) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("gelu",), "activation 'gelu'"),
        (("silu", 0.0), "a SwiGLU limit of 0.0"),  # it would clamp everything to 0
        (("silu", -1.0), "a SwiGLU limit of -1.0"),
        (("silu", None, 1.702), "a SwiGLU alpha of 1.702 with a beta of None"),
        (("silu", None, None, 1.0), "a SwiGLU alpha of None with a beta of 1.0"),
        (("swigluoai", None, None, 0.5), "a SwiGLU alpha of 1.702 with a beta of 0.5"),
    ],
)
def test_refused(given: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ValueError, match=f"^layer 0: {named} is not supported with kt options"):
        swiglu_of("layer 0", *given)
