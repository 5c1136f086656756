"""Translates an engine's description of what an expert computes into the CPU layer's settings."""

from __future__ import annotations

from typing import Any

from ..moe.activation import ExpertActivation, check_activation

#: The engines' names of activations, and kt-moe's. `_NO_MUL` may follow.
_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
    "situ": "situ",
    "swiglustep": "swiglustep",
}
_NO_MUL = "_no_mul"  # ends vLLM's names of activations without a gate
# gpt-oss' activation, whose limit, alpha and beta are fixed; and the one with values of the model.
_GPT_OSS, _GIVEN = "swigluoai", "swigluoai_uninterleave"
_GPT_OSS_VALUES = (7.0, 1.702, 1.0)

#: SiLU with a gate, without limit and alpha, and with router weights on the output.
SILU = ExpertActivation()
#: gpt-oss' activation, with the numbers that vLLM's kernel for it has.
GPT_OSS = ExpertActivation(swiglu_limit=_GPT_OSS_VALUES[0], swiglu_alpha=_GPT_OSS_VALUES[1])


def activation_of(
    place: str,
    name: str,
    *,
    gated: bool = True,
    router_weight_on_input: bool = False,
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
    situ_beta: float | None = None,
    situ_linear_beta: float | None = None,
) -> ExpertActivation:
    """The settings of an activation that an engine describes by its name and these values.

    None means that the engine does not give a value.

    Args:
        name: the engine's name, such as "silu", "swigluoai" or "relu2_no_mul".
        gated: False, or a name that ends with "_no_mul": the experts have no gate.
        router_weight_on_input: the router weights multiply the experts' input.
        limit, alpha, beta: of SwiGLU; beta is added to up.
        situ_beta, situ_linear_beta: of SituGLU.

    Raises:
        ValueError: the CPU layer does not compute this activation. The message begins with
            ``place`` and names the value.
    """
    if limit is not None and not limit > 0:
        raise ValueError(f"{place}: a SwiGLU limit of {limit} is not supported with kt options")
    if name.endswith(_NO_MUL):
        name, gated = name.removesuffix(_NO_MUL), False
    if name == _GPT_OSS:
        given = (limit, alpha, beta)
        limit, alpha, beta = (
            fixed if value is None else value
            for value, fixed in zip(given, _GPT_OSS_VALUES, strict=True)
        )
    if name in (_GPT_OSS, _GIVEN):
        name = "silu"
    if name not in _NAMES:
        accepted = ", ".join((*_NAMES, _GPT_OSS, _GIVEN))
        raise ValueError(
            f"{place}: activation {name!r} is not supported with kt options; supported: {accepted}"
        )
    values: dict[str, Any] = {
        "swiglu_limit": limit,
        "swiglu_alpha": _alpha(place, alpha, beta),
        "situ_beta": situ_beta,
        "situ_linear_beta": situ_linear_beta,
    }
    try:
        return check_activation(
            _NAMES[name], gated, router_weight_on_input, **{k: v or 0.0 for k, v in values.items()}
        )
    except ValueError as error:
        raise ValueError(f"{place}: {error}; not supported with kt options") from None


def _alpha(place: str, alpha: float | None, beta: float | None) -> float:
    """KTMoEWrapper's swiglu_alpha, which always goes with a beta of 1."""
    if alpha in (None, 1.0) and beta in (None, 0.0):
        return 0.0
    if alpha and beta == 1.0:
        return alpha
    raise ValueError(
        f"{place}: a SwiGLU alpha of {alpha} with a beta of {beta} is not supported with kt "
        "options; supported: alpha 1 with beta 0, or any other alpha with beta 1"
    )
