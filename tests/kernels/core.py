"""The compiled core under test: the real module, the emulated one, and layers of both.

KT_EMUL_MODULE is the file of `_C_emul`, built with -DKT_EMULATE=ON (kernels/CMakeLists.txt).
KT_SMALL_SWEEP makes the sweeps small, for slow builds: the tables of a sanitized module, one
variant of each format, and the requested kernels.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from kt_kernel import _C

from . import ggml, sources
from .sources import (
    BF16,
    BFLOAT16,
    FP8_BLOCK,
    FP8_ROW,
    FP16,
    FP32,
    INT4_GROUP,
    INT4_ROW,
    INT4_ZERO,
    INT8_ROW,
    MXFP4,
    MXFP8,
    NVFP4,
)

Floats = npt.NDArray[np.float32]


# kt::ActFunction (kernels/include/kt/kernel_table.h), written anew.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "situ", "swiglustep")


class Kind(IntEnum):
    """Which kernels compute. AUTO selects one or the other for each expert, by its rows."""

    AUTO = 0
    VECTOR = 1
    TILE = 2


AUTO, VECTOR, TILE = Kind
ALL_TABLES = ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2")
SMALL_SWEEP = "KT_SMALL_SWEEP" in os.environ
KINDS = (VECTOR, TILE) if SMALL_SWEEP else (AUTO, VECTOR, TILE)

FORMAT_NAMES = {
    BF16: "bf16",
    INT8_ROW: "int8",
    INT4_ROW: "int4",
    INT4_GROUP: "int4_group",
    INT4_ZERO: "int4_zero",
    FP8_BLOCK: "fp8_block",
    FP8_ROW: "fp8_row",
    MXFP8: "mxfp8",
    MXFP4: "mxfp4",
    NVFP4: "nvfp4",
    **{f: name.lower() for f, name in ggml.NAMES.items()},
}
SCALE_NAMES = {FP16: "fp16", BFLOAT16: "bf16", FP32: "fp32"}
INTEGER = (INT8_ROW, INT4_ROW)  # int8 activations, one scale per row


class Format(NamedTuple):
    """How weights are packed, and from which source."""

    code: int
    group: int = 0
    scale_type: int | None = None  # of quantised sources; None: packed from dense float32 weights

    @property
    def name(self) -> str:
        name = FORMAT_NAMES[self.code] + (str(self.group) if self.group else "")
        if self.scale_type is None:
            return name if self.code in (BF16, INT8_ROW, INT4_ROW) else f"{name}-dense"
        return f"{name}-{SCALE_NAMES[self.scale_type]}" if self.group else name

    @property
    def form(self) -> tuple[int, int, int]:
        """The arguments of the core."""
        return self.code, self.group, self.scale_type or 0

    @property
    def column_unit(self) -> int:
        """The number of columns must be a multiple of this."""
        return sources.column_unit(self.code, self.group)

    @property
    def pool_unit(self) -> int:
        """A pool's part of I must be a multiple of this."""
        if self.group or self.code in ggml.GGML:
            return self.column_unit
        return {FP8_BLOCK: 128, BF16: 32, NVFP4: 32}.get(self.code, 64)

    def fit(self, *sizes: int) -> tuple[int, ...]:
        """Numbers of columns, rounded up to what the format accepts."""
        return tuple(-(-size // self.column_unit) * self.column_unit for size in sizes)


DENSE = [
    Format(BF16),
    Format(INT8_ROW),
    Format(INT4_ROW),
    Format(INT4_GROUP, 32),
    Format(INT4_GROUP, 128),
]
QUANTISED = [Format(*variant) for variant in sources.SCALED_VARIANTS]
# The kernels' own sweeps use all of ggml's formats. Layers use two: one with blocks of 32 and an
# offset, and one with blocks of 256 and minimums, whose layers are at least 256 columns wide.
BLOCKS = [Format(code, 0, FP16) for code in (ggml.Q5_0, ggml.Q4_K)]
ALL_BLOCKS = [Format(*variant) for variant in sources.GGML_VARIANTS]
# The group size and the type of scales only affect how scales are loaded.
ONE_OF_EACH = [
    Format(BF16),
    Format(INT8_ROW),
    Format(INT4_ROW),
    Format(INT4_GROUP, 32, BFLOAT16),
    Format(INT4_ZERO, 128, FP16),
    *[f for f in QUANTISED if not f.group],
    *BLOCKS,
]
FORMATS = ONE_OF_EACH if SMALL_SWEEP else DENSE + QUANTISED + BLOCKS[:1]


@cache
def module(name: str) -> ModuleType | None:
    """`_C` or `_C_emul`; None if the emulated module was not built."""
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


class Variant(NamedTuple):
    """A kernel table of one of the modules."""

    module: str
    table: str

    @property
    def name(self) -> str:
        return f"{self.module}-{self.table}"

    @property
    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        core = module(self.module)
        if core is None:
            return "KT_EMUL_MODULE is not set: the emulated kernels were not built"
        if self.table not in core.kernel_tables():
            return f"this CPU cannot run the {self.table} kernels"
        return None


def core_with(name: str, table: str) -> ModuleType:
    """The module. Skips the test if the table cannot run in it."""
    if reason := Variant(name, table).missing:
        pytest.skip(reason)
    core = module(name)
    assert core is not None
    return core


# Real instructions if the CPU has them, emulated ones everywhere.
if SMALL_SWEEP:
    VARIANTS = [Variant("_C_emul", t) for t in ("amx", "avx512_vnni", "avx2")]
else:
    VARIANTS = [Variant("_C", t) for t in ALL_TABLES]
    VARIANTS += [Variant("_C_emul", t) for t in ALL_TABLES if t != "avx2"]

# Modules for tests that use no kernels: packing.
MODULES = [Variant("_C_emul", "avx2")]
if not SMALL_SWEEP:
    MODULES.insert(0, Variant("_C", "avx2"))


def kernel(case: Any) -> tuple[Variant, Format, Kind]:
    """A goal of grids (tests/grid.py): every kernel of every format."""
    return case.variant, case.format, case.kind


def formats(chosen: list[Format]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("format", chosen, ids=[f.name for f in chosen])


@cache
def team(core_name: str, threads: tuple[int, ...], reserves: tuple[int, ...] = ()) -> Any:
    core = module(core_name)
    assert core is not None
    return core.Team(list(threads), [-1] * len(threads), list(reserves))


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
    reserves: tuple[int, ...] = ()
    kind: int = AUTO
    max_tokens: int = 256
    biases: bool = False
    limit: float = 0.0
    alpha: float = 0.0
    cpu_slots: list[bool] | None = None
    seed: int = 0
    scale_type: int | None = None
    gemm_min_rows: list[int] = field(default_factory=lambda: [0] * 3)
    mixed: tuple[Format, ...] = ()  # formats of gate, up and down, instead of one for all
    activation: str = "silu"
    gated: bool = True
    weight_on_input: bool = False
    situ: tuple[float, float] = (1.0, 0.0)  # beta, linear beta
    # For gate [I, H], up [I, H] and down [H, I], one matrix per expert: float32, or a Source.
    # Without a gate, up and down only; so also the biases.
    weights: list[Any] = field(default_factory=list)
    bias: list[Floats] = field(default_factory=list)

    @classmethod
    def of(cls, variant: tuple[str, str], format: Format, *sizes: int, **rest: Any) -> Layer:
        """A layer with weights for the format. sizes: experts, top_k, hidden, inter."""
        return cls(variant, format.code, format.group, *sizes, scale_type=format.scale_type, **rest)

    def __post_init__(self) -> None:
        core = core_with(*self.variant)
        rng = np.random.default_rng(self.seed)
        formats = self.mixed or (Format(self.format, self.group, self.scale_type),) * 3
        e, h, i = self.experts, self.hidden, self.inter
        self.weights = self.weights or [
            random_weights(formats[m], rng, e, *self.shapes[m]) for m in self.matrices
        ]
        if self.biases:
            rows = [self.shapes[m][0] for m in self.matrices]
            self.bias = [(rng.standard_normal((e, n)) * 0.1).astype(np.float32) for n in rows]
        self.slots = self.cpu_slots or [True] * e
        made = team(self.variant[0], self.threads, self.reserves)
        self.layer = core.MoeLayer(
            made,
            num_experts=e,
            top_k=self.top_k,
            hidden_size=h,
            intermediate_size=i,
            forms=[f.form for f in formats],
            cpu_slots=self.slots,
            swiglu_limit=self.limit,
            swiglu_alpha=self.alpha,
            max_tokens=self.max_tokens,
            table=self.variant[1],
            kind=self.kind,
            gemm_min_rows=self.gemm_min_rows,
            activation=ACTIVATIONS.index(self.activation),
            gated=self.gated,
            weight_on_input=self.weight_on_input,
            situ_beta=self.situ[0],
            situ_linear_beta=self.situ[1],
        )
        for slot in range(e):
            if self.slots[slot]:
                self.load(slot)

    @property
    def matrices(self) -> range:
        """The numbers of the matrices of an expert."""
        return range(0 if self.gated else 1, 3)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return [(self.inter, self.hidden), (self.inter, self.hidden), (self.hidden, self.inter)]

    def load(self, slot: int) -> None:
        matrices = [
            w[slot] if isinstance(w, list) else np.ascontiguousarray(w[slot], np.float32)
            for w in self.weights
        ]
        biases = [b[slot].ctypes.data for b in self.bias]
        none = 3 - len(matrices)  # of a gate
        self.layer.load(
            slot,
            *[(0, 0, 0, 1.0)] * none,
            *[sources.address_of(w) for w in matrices],
            *[0] * none * bool(biases),
            *biases,
            dtypes=[-1] * none + [sources.dtype_of(w) for w in matrices],
        )

    def unpacked(self) -> list[Floats]:
        """Dequantised weights; zeros for slots that are not held."""
        result = []
        for matrix in self.matrices:
            values = np.zeros((self.experts, *self.shapes[matrix]), np.float32)
            for slot in range(self.experts):
                if self.slots[slot]:
                    self.layer.unpack(slot, matrix, values[slot])
            result.append(values)
        return result

    def batch(self, tokens: int, seed: int = 1) -> tuple[Floats, Any, Floats]:
        """x [T,H], ids [T,k] including out-of-range and repeated ids, router weights [T,k]."""
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

    def reference(
        self, x: Floats, ids: Any, weights: Floats, unpacked: list[Any] | None = None
    ) -> npt.NDArray[np.float64]:
        """The oracle's y, with the layer's own weights or the given ones."""
        names = ["gate_bias", "up_bias", "down_bias"][-len(self.bias) :] if self.bias else []
        biases = dict(zip(names, [b.astype(float) for b in self.bias], strict=True))
        values = [w.astype(float, copy=False) for w in unpacked or self.unpacked()]
        return _C.reference_forward(
            x.astype(float),
            np.ascontiguousarray(ids, np.int64),
            weights.astype(float),
            *[None] * (3 - len(values)),
            *values,
            activation_format=int(self.format in INTEGER),
            skip=[not s for s in self.slots],
            swiglu_limit=self.limit,
            swiglu_alpha=self.alpha,
            activation=self.activation,
            weight_on_input=self.weight_on_input,
            situ_beta=self.situ[0],
            situ_linear_beta=self.situ[1],
            **biases,
        )


def random_weights(format: Format, rng: Any, experts: int, n: int, k: int) -> Any:
    """One matrix per expert, such that products with normal activations are about normal."""
    if format.scale_type is None:
        return (rng.standard_normal((experts, n, k)) * k**-0.5).astype(np.float32)
    made = [
        sources.make(format.code, n, k, format.group, format.scale_type, seed=int(seed))
        for seed in rng.integers(1 << 32, size=experts)
    ]
    for source in made:  # e4m3 codes with equal frequency have an rms of about 130
        if format.code == MXFP8:
            source.scale -= np.uint8(4)
        elif format.code in (FP8_BLOCK, FP8_ROW):
            source.scale /= 16
    return made


def row_errors(y: Floats, reference: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """||y - ref|| / ||ref|| per row; rows that should be zero must be exactly zero."""
    norm = np.linalg.norm(reference, axis=1)
    error = np.linalg.norm(y - reference, axis=1)
    assert not np.any(error[norm == 0]), "a token without experts must give exact zeros"
    return error / np.where(norm == 0, 1, norm)
