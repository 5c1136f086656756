"""Translates an engine's description of the experts' activation into the CPU layer's settings.

The CPU layer computes ``act(gate) * up``: SiLU, optionally with gate and up clamped by a limit, or
``gate * sigmoid(alpha * gate) * (up + 1)`` (gpt-oss), with the same clamps.
"""

from __future__ import annotations

from dataclasses import dataclass

_SILU_NAMES = ("silu", "swish")
# gpt-oss' activation, whose limit, alpha and beta are fixed; and the one with values of the model.
_GPT_OSS, _GIVEN = "swigluoai", "swigluoai_uninterleave"
_GPT_OSS_VALUES = (7.0, 1.702, 1.0)


@dataclass(frozen=True)
class Swiglu:
    """limit: clamp of gate (from above) and up (on both sides), 0 for none. alpha: factor of gate
    inside the sigmoid, with ``up + 1``; 0 for plain SiLU. As `KTMoEWrapper`'s arguments."""

    limit: float = 0.0
    alpha: float = 0.0


#: No limit and no alpha.
SILU = Swiglu()


def swiglu_of(
    place: str,
    activation: str,
    limit: float | None = None,
    alpha: float | None = None,
    beta: float | None = None,
) -> Swiglu:
    """The settings of an activation that an engine describes by its name and these values.

    None means that the engine does not give a value. beta is added to up.

    Raises:
        ValueError: the CPU layer does not compute this activation. The message begins with
            ``place`` and names the value.
    """
    if limit is not None and not limit > 0:
        raise ValueError(f"{place}: a SwiGLU limit of {limit} is not supported with kt options")
    if activation == _GPT_OSS:
        given = (limit, alpha, beta)
        limit, alpha, beta = (
            fixed if value is None else value
            for value, fixed in zip(given, _GPT_OSS_VALUES, strict=True)
        )
    elif activation not in (*_SILU_NAMES, _GIVEN):
        raise ValueError(
            f"{place}: activation {activation!r} is not supported with kt options; supported: "
            f"{_SILU_NAMES[0]}, {_GPT_OSS}, {_GIVEN}"
        )
    if alpha in (None, 1.0) and beta in (None, 0.0):
        return Swiglu(limit or 0.0)
    if alpha and beta == 1.0:
        return Swiglu(limit or 0.0, alpha)
    raise ValueError(
        f"{place}: a SwiGLU alpha of {alpha} with a beta of {beta} is not supported with kt "
        "options; supported: alpha 1 with beta 0, or any other alpha with beta 1"
    )
