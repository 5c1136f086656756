"""What an expert computes between its first products and down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..weights.expert_tensors import MATRICES
from .values import boolean, real

#: Activation functions of experts, in the order of kt::ActFunction (kernels/include/kt).
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "situ", "swiglustep")
_NEED_A_GATE = ("situ", "swiglustep")
#: The activations that these arguments belong to, with a gate.
_USES = {
    "swiglu_limit": ("silu", "swiglustep"),
    "swiglu_alpha": ("silu",),
    "situ_beta": ("situ",),
    "situ_linear_beta": ("situ",),
}


@dataclass(frozen=True)
class ExpertActivation:
    """See the arguments of ``KTMoEWrapper``."""

    function: str = "silu"
    gated: bool = True
    router_weight_on_input: bool = False
    swiglu_limit: float = 0.0
    swiglu_alpha: float = 0.0
    situ_beta: float = 0.0  # not 0 with "situ"
    situ_linear_beta: float = 0.0

    @property
    def matrices(self) -> tuple[str, ...]:
        """The matrices of an expert: `MATRICES`, without "gate" if there is no gate."""
        return MATRICES if self.gated else MATRICES[1:]

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
            "situ_beta": self.situ_beta or 1.0,
            "situ_linear_beta": self.situ_linear_beta,
        }

    def __str__(self) -> str:
        """For error messages: the arguments that differ from SwiGLU."""
        parts = [f"activation={self.function!r}"]
        if not self.gated:
            parts.append("gated=False")
        if self.router_weight_on_input:
            parts.append("apply_router_weight_on_input=True")
        numbers = {name: getattr(self, name) for name in _USES}
        parts += [f"{name}={value:g}" for name, value in numbers.items() if value]
        return ", ".join(parts)


def check_activation(
    activation: Any = "silu",
    gated: Any = True,
    apply_router_weight_on_input: Any = False,
    **numbers: Any,
) -> ExpertActivation:
    """Checks the constructor's arguments of these names; raises TypeError or ValueError.

    numbers: swiglu_limit, swiglu_alpha, situ_beta, situ_linear_beta. None and 0 mean not given.
    """
    if not isinstance(activation, str):
        raise TypeError(f"activation must be a string, got {type(activation).__name__}")
    if activation not in ACTIVATIONS:
        accepted = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation={activation!r}; accepted: {accepted}")
    boolean("gated", gated)
    boolean("apply_router_weight_on_input", apply_router_weight_on_input)
    if activation in _NEED_A_GATE and not gated:
        raise ValueError(f"gated=False with activation={activation!r}; accepted: True")
    given = {"situ_beta": 1.0} if activation == "situ" else {}
    for name, value in numbers.items():
        number = real(name, value, None if name == "swiglu_alpha" else 0.0)
        if not number:
            continue
        if activation not in _USES[name] or not gated:
            accepted = " or ".join(f"activation={use!r}" for use in _USES[name])
            raise ValueError(
                f"{name}={number:g} with activation={activation!r}, gated={gated}; accepted: 0, or "
                f"{accepted} with gated=True"
            )
        given[name] = number
    return ExpertActivation(activation, gated, apply_router_weight_on_input, **given)
