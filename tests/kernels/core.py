"""The compiled core under test: the real module and the emulated one, and one layer of each.

KT_EMUL_MODULE names the file of `_C_emul`, built with -DKT_EMULATE=ON (kernels/CMakeLists.txt).
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kt_kernel import _C

Floats = npt.NDArray[np.float32]

BF16, INT8_ROW, INT4_ROW, INT4_GROUP = 0, 1, 2, 3
FORMATS = [(BF16, 0), (INT8_ROW, 0), (INT4_ROW, 0), (INT4_GROUP, 32), (INT4_GROUP, 128)]
AUTO, VECTOR, TILE = 0, 1, 2
REFERENCE_ACTIVATION = {BF16: 0, INT8_ROW: 1, INT4_ROW: 1, INT4_GROUP: 0}
ALL_TABLES = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2")


@cache
def module(name: str) -> ModuleType | None:
    """`_C` or `_C_emul`; None where the emulated module was not built."""
    if name == "_C":
        return _C
    path = os.environ.get("KT_EMUL_MODULE")
    if not path:
        return None
    spec = importlib.util.spec_from_file_location("_C_emul", path)
    assert spec and spec.loader, path
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def core_with(name: str, table: str) -> ModuleType:
    """The module, or a visible skip where this table cannot run in it."""
    core = module(name)
    if core is None:
        pytest.skip("KT_EMUL_MODULE is not set: the emulated kernels were not built")
    if table not in core.kernel_tables():
        pytest.skip(f"this CPU cannot run the {table} kernels")
    return core


# (module, table): real instructions where the CPU has them, emulated ones everywhere.
VARIANTS = [("_C", t) for t in ALL_TABLES] + [("_C_emul", t) for t in ALL_TABLES if t != "avx2"]


@cache
def team(core_name: str, threads: tuple[int, ...]) -> Any:
    core = module(core_name)
    assert core is not None
    return core.Team(list(threads), [-1] * len(threads))


@dataclass
class Layer:
    """A random layer: packed weights, and what the oracle needs of them."""

    variant: tuple[str, str]
    format: int
    group: int
    experts: int = 4
    top_k: int = 2
    hidden: int = 64
    inter: int = 96
    threads: tuple[int, ...] = (2,)
    kind: int = AUTO
    max_tokens: int = 256
    biases: bool = False
    limit: float = 0.0
    alpha: float = 0.0
    cpu_slots: list[bool] | None = None
    seed: int = 0
    weights: list[Floats] | None = None  # gate [E,I,H], up [E,I,H], down [E,H,I]
    bias: list[Floats] = field(default_factory=list)

    def __post_init__(self) -> None:
        core = core_with(*self.variant)
        rng = np.random.default_rng(self.seed)
        e, h, i = self.experts, self.hidden, self.inter

        def normal(scale: float, *shape: int) -> Floats:
            return (rng.standard_normal(shape) * scale).astype(np.float32)

        if self.weights is None:
            self.weights = [
                normal(h**-0.5, e, i, h),
                normal(h**-0.5, e, i, h),
                normal(i**-0.5, e, h, i),
            ]
        if self.biases:
            self.bias = [normal(0.1, e, i), normal(0.1, e, i), normal(0.1, e, h)]
        self.slots = self.cpu_slots or [True] * e
        self.layer = core.MoeLayer(
            team(self.variant[0], self.threads), num_experts=e, top_k=self.top_k, hidden_size=h,
            intermediate_size=i, format=self.format, group_size=self.group, cpu_slots=self.slots,
            swiglu_limit=self.limit, swiglu_alpha=self.alpha, max_tokens=self.max_tokens,
            table=self.variant[1], kind=self.kind,
        )  # fmt: skip
        for slot in range(e):
            if self.slots[slot]:
                self.load(slot)

    def load(self, slot: int) -> None:
        assert self.weights is not None
        self.layer.load_expert(
            slot,
            *[np.ascontiguousarray(w[slot]).ctypes.data for w in self.weights],
            2,
            *[b[slot].ctypes.data for b in self.bias],
        )

    def unpacked(self) -> list[Floats]:
        """Dequantised weights; zeros for slots not held."""
        assert self.weights is not None
        result = [np.zeros_like(w) for w in self.weights]
        for slot in range(self.experts):
            for matrix in range(3):
                if self.slots[slot]:
                    self.layer.unpack(slot, matrix, result[matrix][slot].ctypes.data)
        return result

    def batch(self, tokens: int, seed: int = 1) -> tuple[Floats, Any, Floats]:
        """x [T,H], ids [T,k] with out-of-range and repeated ids, router weights [T,k]."""
        rng = np.random.default_rng(seed)
        return (
            rng.standard_normal((tokens, self.hidden)).astype(np.float32),
            rng.integers(-1, self.experts + 1, (tokens, self.top_k)),
            rng.random((tokens, self.top_k)).astype(np.float32),
        )

    def forward(self, x: Floats, ids: Any, weights: Floats) -> Floats:
        y = np.full(x.shape, np.float32(7))
        ids = np.ascontiguousarray(ids, np.int64)
        self.layer.submit(
            x.ctypes.data, 2, len(x), ids.ctypes.data, weights.ctypes.data, y.ctypes.data
        ).wait()
        return y

    def reference(self, x: Floats, ids: Any, weights: Floats) -> npt.NDArray[np.float64]:
        names = ("gate_bias", "up_bias", "down_bias") if self.bias else ()
        biases = dict(zip(names, [b.astype(float) for b in self.bias], strict=True))
        return _C.reference_forward(
            x.astype(float), np.ascontiguousarray(ids, np.int64), weights.astype(float),
            *[w.astype(float) for w in self.unpacked()],
            activation_format=REFERENCE_ACTIVATION[self.format],
            skip=[not s for s in self.slots], swiglu_limit=self.limit, swiglu_alpha=self.alpha,
            **biases,
        )  # fmt: skip


def row_errors(y: Floats, reference: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """||y - ref|| / ||ref|| per row; rows that should be zero must be exactly zero."""
    norm = np.linalg.norm(reference, axis=1)
    error = np.linalg.norm(y - reference, axis=1)
    assert not np.any(error[norm == 0]), "a token without experts must give exact zeros"
    return error / np.where(norm == 0, 1, norm)
