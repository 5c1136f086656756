"""What an expert computes between its first products and down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .values import boolean, real

#: Activation functions of experts, in the order of kt::ActFunction (kernels/include/kt).
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2")


@dataclass(frozen=True)
class ExpertActivation:
    """See the arguments of ``KTMoEWrapper``."""

    function: str = "silu"
    gated: bool = True
    router_weight_on_input: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0

    @property
    def is_swiglu(self) -> bool:
        """SiLU with a gate, with or without limit and alpha, and router weights on the output."""
        return self.function == "silu" and self.gated and not self.router_weight_on_input

    @property
    def core(self) -> dict[str, Any]:
        """The arguments of the compiled core."""
        return {
            "activation": ACTIVATIONS.index(self.function),
            "gated": self.gated,
            "weight_on_input": self.router_weight_on_input,
            "swiglu_limit": self.swiglu_limit,
            "swiglu_alpha": self.swiglu_alpha,
        }

    def __str__(self) -> str:
        """For error messages: the arguments that differ from SwiGLU."""
        parts = [f"activation={self.function!r}"]
        if not self.gated:
            parts.append("gated=False")
        if self.router_weight_on_input:
            parts.append("apply_router_weight_on_input=True")
        return ", ".join(parts)


def check_activation(
    activation: Any = "silu",
    gated: Any = True,
    apply_router_weight_on_input: Any = False,
    swiglu_limit: Any = 0.0,
    swiglu_alpha: Any = 0.0,
) -> ExpertActivation:
    """Checks the constructor's arguments of these names; raises TypeError or ValueError."""
    if not isinstance(activation, str):
        raise TypeError(f"activation must be a string, got {type(activation).__name__}")
    if activation not in ACTIVATIONS:
        accepted = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation={activation!r}; accepted: {accepted}")
    checked = ExpertActivation(
        activation,
        boolean("gated", gated),
        boolean("apply_router_weight_on_input", apply_router_weight_on_input),
        real("swiglu_limit", swiglu_limit, 0.0),
        real("swiglu_alpha", swiglu_alpha),
    )
    if activation == "silu" and checked.gated:
        return checked
    for name in ("swiglu_limit", "swiglu_alpha"):
        if value := getattr(checked, name):
            raise ValueError(
                f"{name}={value:g} with {checked}; accepted: 0, or activation='silu' with "
                "gated=True"
            )
    return checked
