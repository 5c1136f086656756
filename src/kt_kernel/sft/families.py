"""Modules of transformers that hold all experts of a layer, and what they compute.

A class that is listed was compared with its own forward pass by tests/sft/test_wrap.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from .peft_format import Layout

#: The supported modules by class name, and how their adapters are arranged. Their base weights are
#: in ``gate_up_proj`` and ``down_proj``, 3-D parameters with one expert in each row.
SUPPORTED = {
    "DeepseekV2Experts": Layout(),
    "DeepseekV3Experts": Layout(),
    "Glm4MoeExperts": Layout(),
    "GptOssExperts": Layout(interleaved=True, single=False),
    "MixtralExperts": Layout(names=("w1", "w3", "w2"), block="block_sparse_moe"),
    "Qwen2MoeExperts": Layout(),
    "Qwen3MoeExperts": Layout(),
    "Qwen3_5MoeExperts": Layout(),
}


@dataclass(frozen=True)
class Fused:
    """The base weights of a module, and its activation.

    Attributes:
        module: has ``gate_up_proj`` [E, 2I, H] and ``down_proj`` [E, I, H]; with ``transposed``
            [E, H, 2I] and [E, I, H].
        layout: of adapters, and of the weights themselves whether gate and up alternate.
        swiglu_limit, swiglu_alpha: as of ``KTMoEWrapper``.
    """

    module: nn.Module
    transposed: bool
    layout: Layout
    biased: bool
    swiglu_limit: float
    swiglu_alpha: float

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, H, I."""
        experts, rows, columns = _tensor(self.module, "down_proj").shape
        inter, hidden = (rows, columns) if self.transposed else (columns, rows)
        return experts, hidden, inter

    @property
    def on_meta(self) -> bool:
        """Whether the weights have no values."""
        names = "gate_up_proj", "down_proj"
        return all(_tensor(self.module, name).device.type == "meta" for name in names)

    def weights(self) -> dict[str, torch.Tensor]:
        """Views of gate_proj and up_proj [E, I, H] and down_proj [E, H, I], and of the biases where
        there are any."""
        names = ("gate_proj", "up_proj", "down_proj")
        weights = dict(zip(names, (part.detach() for part in self.projections()), strict=True))
        if self.biased:
            gate, up = self._halves(_tensor(self.module, "gate_up_proj_bias").detach())
            down = _tensor(self.module, "down_proj_bias").detach()
            weights |= {"gate_bias": gate, "up_bias": up, "down_bias": down}
        return weights

    def projections(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of gate_proj and up_proj [E, I, H] and down_proj [E, H, I], differentiable in the
        module's parameters."""
        gate_up, down = _tensor(self.module, "gate_up_proj"), _tensor(self.module, "down_proj")
        if self.transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        return *self._halves(gate_up), down

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The module's own parameters of the experts, by name."""
        names = ["gate_up_proj", "down_proj"]
        if self.biased:
            names += ["gate_up_proj_bias", "down_proj_bias"]
        return {name: cast(nn.Parameter, getattr(self.module, name)) for name in names}

    def _halves(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.layout.interleaved:
            return tensor[:, 0::2], tensor[:, 1::2]
        gate, up = tensor.chunk(2, dim=1)
        return gate, up


def _tensor(module: nn.Module, name: str) -> torch.Tensor:
    return cast(torch.Tensor, getattr(module, name))  # torch declares Tensor | Module


def is_fused(module: nn.Module) -> bool:
    """Whether a module holds all experts of a layer in 3-D parameters."""
    parts = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return all(isinstance(part, torch.Tensor) and part.dim() == 3 for part in parts)


def open_fused(path: str, module: nn.Module, allow_untested: bool = False) -> Fused:
    """What a module of fused experts is. ``path`` is its name in the model, for messages.

    Raises:
        ValueError: a class that is not supported, or an activation that is not.
    """
    name = type(module).__name__
    if name not in SUPPORTED and not allow_untested:
        raise ValueError(
            f"{path}: class {name} was not tested; tested: {', '.join(sorted(SUPPORTED))}; pass "
            "allow_untested=True and compare the model's outputs"
        )
    if getattr(module, "_is_expert_parallel", False):
        raise ValueError(f"{path}: the experts are distributed over ranks (expert parallelism)")
    transposed = bool(getattr(module, "is_transposed", False))
    gate_up, down = _tensor(module, "gate_up_proj"), _tensor(module, "down_proj")
    wide, narrow = (2, 1) if transposed else (1, 2)
    if gate_up.shape[wide] != 2 * down.shape[narrow]:
        raise ValueError(
            f"{path}: gate_up_proj is {list(gate_up.shape)} and down_proj {list(down.shape)}; "
            "experts without a gate are not supported"
        )
    limit, alpha = _activation(path, module)
    interleaved = not getattr(module, "is_concatenated", True)
    return Fused(
        module=module,
        transposed=transposed,
        layout=SUPPORTED.get(name, Layout(interleaved=interleaved, single=not interleaved)),
        biased=bool(getattr(module, "has_bias", False)),
        swiglu_limit=limit,
        swiglu_alpha=alpha,
    )


def _activation(path: str, module: nn.Module) -> tuple[float, float]:
    """swiglu_limit and swiglu_alpha."""
    limit = float(getattr(module, "limit", 0.0) or 0.0)
    alpha: Any = getattr(module, "alpha", None)
    if alpha is not None:
        return limit, float(alpha)
    activation: Any = getattr(module, "act_fn", None)
    probe = torch.linspace(-4, 4, 9, device="cpu")
    if activation is None or not torch.equal(activation(probe), nn.functional.silu(probe)):
        raise ValueError(
            f"{path}: activation {type(activation).__name__} is not supported; supported: SiLU"
        )
    return limit, 0.0
