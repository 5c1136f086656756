"""The layer in float64 with PyTorch: what every kernel's output is compared with.

Written from the specification's formulas, apart from the compiled core and from its reference:
an error would have to be made twice to go unnoticed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..weights.formats import WeightFormat
from ..weights.methods import Method, get_method
from ..weights.quantised import QuantisedMatrix
from .rounding import kernel_errors, quantise_weights, round_activations

Experts = torch.Tensor | Sequence[torch.Tensor | QuantisedMatrix]

# Relative error allowed to a float32 sum of products, against the sum of their absolute values.
_FLOAT32_NOISE = 2**-23


_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu2": lambda x: torch.relu(x).square(),
}


def _swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if alpha != 0:
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    return gate * torch.sigmoid(gate) * up


def _swiglu_step(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    limit = limit or torch.inf
    return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)


def _situ(gate: torch.Tensor, up: torch.Tensor, beta: float, linear_beta: float) -> torch.Tensor:
    if linear_beta:
        up = linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * up


@dataclass
class _Layer:
    """How one expert of a layer is computed."""

    int8_activations: bool | None  # None: nothing is rounded
    limit: float
    alpha: float
    activation: str
    situ: tuple[float, float]
    errors: list[Callable[[torch.Tensor], torch.Tensor]]  # of kernels, see `kernel_errors`

    def operand(self, values: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
        if self.int8_activations is None:
            return values.double()
        return round_activations(values, self.int8_activations, like)

    def act(self, *products: torch.Tensor) -> torch.Tensor:
        """h of gate and up, or of up alone."""
        first, up = products[0], products[-1]
        if len(products) == 1:
            return _FUNCTIONS[self.activation](up)
        if self.activation == "silu":
            return _swiglu(first, up, self.limit, self.alpha)
        if self.activation == "swiglustep":
            return _swiglu_step(first, up, self.limit)
        if self.activation == "situ":
            return _situ(first, up, *self.situ)
        return _FUNCTIONS[self.activation](first) * up

    def off(self, products: Sequence[torch.Tensor], offs: Iterable[torch.Tensor]) -> torch.Tensor:
        """How far h is off at most when the products are by so much."""
        middle = self.act(*products)
        ends = [(p - off, p + off) for p, off in zip(products, offs, strict=True)]
        ways = [(self.act(*way) - middle).abs() for way in itertools.product(*ends)]
        return torch.stack(ways).amax(0)

    def step(self, exact: torch.Tensor, off: torch.Tensor) -> torch.Tensor:
        """How far the rounded h is off when h is off by so much before."""
        h = self.operand(exact)
        ways = [self.operand(exact + sign * off, exact) for sign in (-1, 1)]
        return torch.maximum((ways[0] - h).abs(), (ways[1] - h).abs())

    def run(
        self,
        x: torch.Tensor,
        factor: torch.Tensor,
        matrices: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One expert's output for rounded rows x, [T, H], times factor, [T, 1], and a bound of its
        error, [T]. The last matrix is down."""
        *first, down = matrices
        *first_bias, down_bias = biases
        products = [factor * (x @ m.T) + b for m, b in zip(first, first_bias, strict=True)]
        exact = self.act(*products)
        h = self.operand(exact)
        y = h @ down.T + down_bias

        sums = (
            _FLOAT32_NOISE * (factor.abs() * (x.abs() @ m.abs().T) + b.abs())
            for m, b in zip(first, first_bias, strict=True)
        )
        off = self.off(products, sums) + 4 * _FLOAT32_NOISE * exact.abs()
        columns = down.norm(dim=0)
        # Steps are few and count in full; the rest is many small independent errors.
        rest = ((off + _FLOAT32_NOISE * h.abs()) * columns).norm(dim=-1)
        noise = self.step(exact, off) @ columns + 2 * rest + _FLOAT32_NOISE * down_bias.norm()
        for error in self.errors:
            offs = (2 * factor.abs() * (error(x).square() @ m.square().T).sqrt() for m in first)
            more = off + self.off(products, offs)
            # The steps are many here: independent errors as well.
            noise += 2 * ((self.step(exact, more) + error(h)) * columns).norm(dim=-1)
        return y, noise


def _formats(method: Method, *matrices: Experts) -> set[WeightFormat]:
    """Those of the layer's packed weights."""
    quantised = {m.format for every in matrices for m in every if isinstance(m, QuantisedMatrix)}
    return quantised or {method.format}


def moe_reference(*arguments: Any, **options: Any) -> torch.Tensor:
    """The CPU half of one MoE layer before the last rounding, float64 [T, H].

    Takes what ``moe_reference_with_noise`` takes.
    """
    return moe_reference_with_noise(*arguments, **options)[0]


def moe_reference_with_noise(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate: Experts | None,
    up: Experts,
    down: Experts,
    *,
    method: str = "BF16",
    physical_to_logical_map: torch.Tensor | None = None,
    gpu_experts_mask: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    swiglu_limit: float = 0.0,
    swiglu_alpha: float = 0.0,
    activation: str = "silu",
    situ_beta: float = 1.0,
    situ_linear_beta: float = 0.0,
    apply_router_weight_on_input: bool = False,
    rounded: bool = True,
    kind: str = "auto",
    table: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU half of one MoE layer, and how far correct kernels may be from it.

    A kernel that accumulates in float32 arrives at a slightly different h; where h is next to
    the middle between two values of its rounding, it may round the other way. The second result
    bounds what this, float32 sums, and the roundings that a kind of kernel adds can do to a row. It
    takes the many errors of a product for independent of each other and of the activations: a
    bound for activations with random signs.

    Args:
        hidden: [T, H]; topk_ids: [T, k] slots; topk_weights: [T, k].
        gate, up: [E, I, H], down: [E, H, I], logical order, source weights; quantised here. Or E
            quantised matrices each. gate is None for experts without one.
        method: decides the weights' and activations' rounding.
        physical_to_logical_map: [E]; None: the identity.
        gpu_experts_mask: bool [E], True = skipped; None: none.
        gate_bias, up_bias: [E, I], down_bias: [E, H].
        rounded: False leaves out all roundings, of weights too.
        kind: kernels that may run, "vector" (GEMV), "tile" (GEMM) or "auto" (either).
        table: name of their kernel table; None: any.

    Returns:
        (float64 [T, H], not rounded at the end; float64 [T], a bound of ‖y - ref‖₂).
    """
    chosen = get_method(method)
    every = [matrices for matrices in (gate, up, down) if matrices is not None]
    biases = [gate_bias, up_bias, down_bias][-len(every) :]
    layer = _Layer(
        chosen.int8_activations if rounded else None,
        swiglu_limit,
        swiglu_alpha,
        activation,
        (situ_beta, situ_linear_beta),
        kernel_errors(_formats(chosen, *every), kind, table) if rounded else [],
    )
    experts = len(up)
    if physical_to_logical_map is None:
        physical_to_logical_map = torch.arange(experts)

    def weights_of(matrix: torch.Tensor | QuantisedMatrix) -> torch.Tensor:
        if isinstance(matrix, QuantisedMatrix) or rounded:
            return quantise_weights(method, matrix)
        return matrix.double()

    def bias_of(bias: torch.Tensor | None, expert: int) -> torch.Tensor:
        return torch.zeros(1).double() if bias is None else bias[expert].float().double()

    x = layer.operand(hidden)
    scores = topk_weights.float().double()
    y = torch.zeros(hidden.shape, dtype=torch.float64)
    noise = torch.zeros(hidden.shape[0], dtype=torch.float64)
    for slot in range(experts):
        if gpu_experts_mask is not None and bool(gpu_experts_mask[slot]):
            continue
        token, choice = (topk_ids == slot).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        e = int(physical_to_logical_map[slot])
        score = scores[token, choice][:, None]
        one = torch.ones_like(score)
        before, after = (score, one) if apply_router_weight_on_input else (one, score)
        out, error = layer.run(
            x[token],
            before,
            [weights_of(matrix[e]) for matrix in every],
            [bias_of(bias, e) for bias in biases],
        )
        y.index_add_(0, token, out * after)
        noise.index_add_(0, token, error * after[:, 0].abs())
    return y, noise


def row_error(y: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """‖y - ref‖₂ / ‖ref‖₂ per row, float64 [T].

    A row that is zero in the reference counts 0 if it is exactly zero in ``y``, else infinity;
    a row that is NaN in the reference counts 0 if all of it is NaN in ``y``, else infinity.
    """
    y, reference = y.detach().cpu().double(), reference.double()
    size = reference.norm(dim=-1)
    error = (y - reference).norm(dim=-1) / size
    infinity = torch.full_like(size, torch.inf)
    none = torch.zeros_like(size)
    error = torch.where(size == 0, torch.where((y == 0).all(-1), none, infinity), error)
    error = torch.where(size.isnan(), torch.where(y.isnan().all(-1), none, infinity), error)
    return torch.where(error.isnan(), infinity, error)
