"""A layer in training, and what it should compute: float64 with PyTorch's autograd.

Written from the formulas, apart from the compiled core: y = x W^T + scaling * drop(x) A^T B^T with
the layer's own dequantised weights. Gradients are those of this formula at the gate and up that the
forward pass keeps: x before a base product and what is kept are rounded as the kernels do it, with
the gradient of the identity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from kernels.core import INTEGER, TILE, VECTOR, Layer
from kernels.sources import FP8_ROW

from kernels import core

Array = npt.NDArray[Any]
NAMES = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")
WEIGHTS = ("gate", "up", "down")
ROW_LIMIT, LIMIT = 1e-2, 5e-3


def bits_of(values: Array) -> Array:
    """The nearest bf16 of float32 values, as uint16."""
    return torch.from_numpy(values.astype(np.float32)).bfloat16().view(torch.uint16).numpy()


def values_of(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def philox(counter: Array, seed: int) -> Array:
    """Philox 4x32-10 of Salmon et al. (SC 2011): uint32 [..., 4] of counters [..., 4]."""
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        low, high = 0xFFFFFFFF, np.uint64(32)
        c = [(b >> high) ^ c[1] ^ key[0], b & low, (a >> high) ^ c[3] ^ key[1], a & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return np.stack(c, -1).astype(np.uint32)


def mask_of(p: float, seed: int, matrix: int, token: int, expert: int, columns: int) -> Array:
    """What a row is multiplied with: 0 where a column is dropped, else 1 / (1 - p)."""
    if p == 0:
        return np.ones(columns)
    p = float(np.float32(p))
    blocks = -(-columns // 4)
    counter = np.zeros((blocks, 4), np.uint64)
    counter[:, 0], counter[:, 1:] = np.arange(blocks), (token, expert, matrix)
    numbers = philox(counter, seed).reshape(-1)[:columns]
    return np.where(numbers < int(p * 2**32), 0, 1 / (1 - p))


def rounded(values: torch.Tensor, integer: bool = False) -> torch.Tensor:
    """Rounded to bf16, or to int8 with a scale per row; the gradient is that of the identity."""
    v = values.detach()
    if integer:
        scale = v.abs().amax(-1, keepdim=True) / 127
        near = torch.where(scale > 0, (v / scale).round() * scale, 0)
    else:
        near = v.float().bfloat16().double()
    return values + (near - v)


def activate(gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if alpha != 0:
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    return torch.nn.functional.silu(gate) * up


@dataclass
class Batch:
    x: Array  # bf16 bits [T, H]
    ids: Array
    weights: Array
    grad_out: Array  # bf16 bits [T, H]
    seed: int = 1


@dataclass
class Gradients:
    out: Array  # [T, H]
    grad_in: Array
    grad_weights: Array
    grads: list[Array]  # in the order of NAMES, then WEIGHTS


@dataclass
class Trained:
    """A layer with random adapters."""

    base: Layer
    rank: int = 8
    scaling: float = 0.75
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        e, h, i, r = self.base.experts, self.base.hidden, self.base.inter, self.rank
        shapes = [(e, r, h), (e, i, r), (e, r, h), (e, i, r), (e, r, i), (e, h, r)]
        self.adapters = [
            values_of(bits_of(rng.standard_normal(s) * s[2] ** -0.5)).reshape(s) for s in shapes
        ]
        module = core.module(self.base.variant[0])
        assert module is not None
        self.layer = module.SftLayer(self.base.layer, rank=r, scaling=self.scaling, **self.options)
        self.layer.update_lora(*self.adapters)

    @property
    def skips(self) -> bool:
        return bool(self.options.get("skip_lora_grads"))

    @property
    def full(self) -> bool:
        return bool(self.options.get("full_weight_grad"))

    @property
    def dropout(self) -> float:
        return float(self.options.get("dropout", 0))

    def batch(self, tokens: int, seed: int = 1) -> Batch:
        """Ids out of range and repeated among them."""
        rng = np.random.default_rng(seed)
        shape = tokens, self.base.hidden
        x, grad = (bits_of(rng.standard_normal(shape)) for _ in range(2))
        ids = rng.integers(-1, self.base.experts + 1, (tokens, self.base.top_k))
        weights = rng.random(ids.shape).astype(np.float32)
        return Batch(x, ids, weights, grad, seed)

    def forward(self, batch: Batch, save: bool = True) -> Array:
        out = np.full(batch.x.shape, 7, np.uint16)
        self.layer.forward(batch.x, batch.ids, batch.weights, out, save=save, seed=batch.seed)
        return out

    def room(self) -> list[Array]:
        """Arrays for the gradients, with something else in them."""
        shapes = [] if self.skips else [a.shape for a in self.adapters]
        if self.full:
            shapes += [(self.base.experts, *s) for s in self.base.shapes]
        return [np.full(s, 7, np.float32) for s in shapes]

    def backward(self, batch: Batch) -> tuple[Array, Array, list[Array]]:
        grad_in = np.full(batch.x.shape, 7, np.uint16)
        grad_weights = np.full(batch.ids.shape, 7, np.float32)
        grads = self.room()
        finite = self.layer.backward(batch.grad_out, grad_in, grad_weights, grads or None)
        found = (values_of(grad_in), grad_weights, *grads)
        assert finite == all(np.isfinite(values).all() for values in found)
        return grad_in, grad_weights, grads

    def run(self, batch: Batch) -> Gradients:
        out = self.forward(batch)
        grad_in, grad_weights, grads = self.backward(batch)
        return Gradients(values_of(out), values_of(grad_in), grad_weights, grads)

    def rounds_weights(self, batch: Batch) -> Array:
        """Where forward products are of weights rounded to bf16, bool [T, experts].

        The tile unit takes bf16, or int8 for formats with a scale for each row. It takes FP8 with
        such scales without rounding, too: they are applied to the results. A kernel is chosen for
        the pairs of an expert in a chunk.
        """
        base = self.base
        rounded = np.zeros((len(batch.x), base.experts), bool)
        if base.variant[1] != "amx" or base.kind == VECTOR or base.format in (*INTEGER, FP8_ROW):
            return rounded
        (least,) = {1} if base.kind == TILE else {*base.gemm_min_rows}
        assert least > 0, "the oracle needs to know from how many pairs tiles are used"
        for first in range(0, len(batch.x), base.max_tokens):
            chunk = slice(first, first + base.max_tokens)
            for expert in range(base.experts):
                rounded[chunk, expert] = np.sum(batch.ids[chunk] == expert) >= least
        return rounded

    def reference(self, batch: Batch) -> Gradients:
        base, names = self.base, ([] if self.skips else list(NAMES))
        leaf = lambda a: torch.tensor(a, dtype=torch.float64, requires_grad=True)  # noqa: E731
        x, router = leaf(values_of(batch.x)), leaf(batch.weights)
        adapters = dict(zip(NAMES, map(leaf, self.adapters), strict=True))
        weights = dict(zip(WEIGHTS, map(leaf, base.unpacked()), strict=True))
        bias = [torch.from_numpy(b).double() for b in base.bias] or [None] * 3
        integer = base.format in INTEGER
        rounds_weights = self.rounds_weights(batch)

        def project(
            m: int,
            values: torch.Tensor,
            token: int,
            expert: int,
            operand: torch.Tensor | None = None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """The base product, and the adapter's, which is a constant where backward leaves it
            out. Given the `operand` of the forward pass, the base product has its value, and the
            gradients of backward's."""
            name = WEIGHTS[m]
            w = weights[name][expert]
            # The transposed products of the tile unit are of weights in bf16.
            y = values @ (rounded(w) if base.variant[1] == "amx" else w).T
            if operand is not None:
                forward = rounded(w) if rounds_weights[token, expert] else w
                y = y + (operand @ forward.T - y).detach()
            if bias[m] is not None:
                y = y + bias[m][expert]
            mask = mask_of(self.dropout, batch.seed, m, token, expert, values.shape[-1])
            low = rounded(torch.from_numpy(mask) * values) @ adapters[f"{name}_a"][expert].T
            term = rounded(self.scaling * low) @ adapters[f"{name}_b"][expert].T
            return y, term.detach() if self.skips else term

        rows, outs = [], []
        for t in range(len(batch.x)):
            row, out = 0 * x[t], torch.zeros(base.hidden, dtype=torch.float64)
            for j, e in enumerate(batch.ids[t]):
                if not (0 <= e < base.experts and base.slots[e]):
                    continue
                weight = router[t, j]
                gate, up = (sum(project(m, x[t], t, e, rounded(x[t], integer))) for m in (0, 1))
                h = activate(gate, up, base.limit, base.alpha)
                out = out + (weight * sum(project(2, h, t, e, rounded(h, integer)))).detach()
                # Backward sees gate and up as they are kept, and h as it follows from them.
                h = activate(rounded(gate), rounded(up), base.limit, base.alpha)
                y, term = project(2, h, t, e)
                row = row + weight * y + (weight.detach() if self.skips else weight) * term
            rows.append(row)
            outs.append(out)
        y = torch.stack(rows)
        leaves = [x, router, *(adapters[n] for n in names)]
        leaves += [weights[n] for n in WEIGHTS] if self.full else []
        upstream = torch.from_numpy(values_of(batch.grad_out)).double()
        found = torch.autograd.grad(y, leaves, upstream, allow_unused=True)
        values = [
            np.zeros(leaf.shape) if g is None else g.numpy()
            for g, leaf in zip(found, leaves, strict=True)
        ]
        return Gradients(torch.stack(outs).numpy(), values[0], values[1], values[2:])


def errors(given: Array, wanted: Array) -> tuple[float, float]:
    """The largest error of a row, relative to its norm or, where that is more, to the rows' root
    mean square; and the error of the whole. A row is a token's, or all of an expert's gradient.
    What should be zero must be zero."""
    assert not np.any(given[wanted == 0]), "what nothing adds to must be zero"
    given, wanted = given.reshape(len(given), -1), wanted.reshape(len(wanted), -1)
    error, norm = (np.linalg.norm(x, axis=-1) for x in (given.astype(float) - wanted, wanted))
    if not np.any(norm):
        return 0.0, 0.0
    usual = np.sqrt(np.mean(norm[norm > 0] ** 2))
    rows = float(np.max(error / np.maximum(norm, usual)))
    return rows, float(np.linalg.norm(error) / np.linalg.norm(norm))


def check(trained: Trained, batch: Batch, got: Gradients | None = None) -> None:
    """A forward and a backward pass against the reference."""
    got = got or trained.run(batch)
    wanted = trained.reference(batch)
    pairs = {
        "out": (got.out, wanted.out),
        "grad_in": (got.grad_in, wanted.grad_in),
        "grad_weights": (got.grad_weights, wanted.grad_weights),
    }
    names = ([] if trained.skips else list(NAMES)) + (list(WEIGHTS) if trained.full else [])
    assert len(names) == len(got.grads) == len(wanted.grads)
    pairs |= {n: p for n, *p in zip(names, got.grads, wanted.grads, strict=True)}
    found = {name: errors(*pair) for name, pair in pairs.items()}
    # The scalar products of few tokens may cancel: of grad_weights only the rows count.
    limits = {name: (ROW_LIMIT, ROW_LIMIT if name == "grad_weights" else LIMIT) for name in found}
    assert all(e <= limit for n in found for e, limit in zip(found[n], limits[n], strict=True)), (
        found
    )
