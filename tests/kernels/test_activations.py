"""What experts may compute besides SwiGLU: other activations, no gate, router weights on the input.

The oracle is kernels/ref. Single values are compared with the formulas of Python's math module.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from grid import grid

from . import core
from .core import (
    ACTIVATIONS,
    BF16,
    FP8_BLOCK,
    INT4_GROUP,
    INT8_ROW,
    KINDS,
    NVFP4,
    ONE_OF_EACH,
    TILE,
    VARIANTS,
    VECTOR,
    Floats,
    Format,
    Kind,
    Layer,
    Variant,
)
from .ggml import Q5_0
from .oracle import check
from .sources import bf16_values


class Function(NamedTuple):
    """What an expert computes between its first products and down."""

    activation: str
    gated: bool = True
    weight_on_input: bool = False
    limit: float = 0.0
    situ: tuple[float, float] = (1.0, 0.0)

    @property
    def name(self) -> str:
        gate = "gated" if self.gated else "ungated"
        return f"{self.activation}-{gate}" + ("-input" if self.weight_on_input else "")


# All but SwiGLU, whose sweeps are in the other files.
FUNCTIONS = [
    Function(activation, gated, weight_on_input)
    for activation, gated in itertools.product(ACTIVATIONS[:4], (True, False))
    for weight_on_input in (False, True)
    if (activation, gated, weight_on_input) != ("silu", True, False)
]
FUNCTIONS += [
    Function("situ", situ=(0.8, 1.1)),
    Function("situ", weight_on_input=True, situ=(4.0, 0.0)),
    Function("swiglustep", limit=0.4),
]
FEW = FUNCTIONS[::3]
# One format for each kind of activation rows and of blocks; tests/moe has all formats.
FORMATS = [f for f in ONE_OF_EACH if f.code in (BF16, INT8_ROW, INT4_GROUP, FP8_BLOCK, NVFP4, Q5_0)]
UNGATED = [Function("relu2", False), Function("gelu", False)]


def made(variant: Variant, format: Format, function: Function, *sizes: int, **rest: Any) -> Layer:
    return Layer.of(variant, format, *sizes, **function._asdict(), **rest)


THREADS = [(2,), (1, 2)]


def one_team_and_biases(case: Any) -> bool:
    """Threads and biases do not meet the function, so each of the other cases has one of both."""
    number = KINDS.index(case.kind) + FUNCTIONS.index(case.function)
    return 2 * THREADS.index(case.threads) + case.biases == number % 4


@grid(
    variant=VARIANTS,
    format=FORMATS,
    kind=KINDS,
    function=FUNCTIONS,
    threads=THREADS,
    biases=[False, True],
    where=one_team_and_biases,
)
def test_against_the_oracle(
    variant: Variant,
    format: Format,
    kind: Kind,
    function: Function,
    threads: tuple[int, ...],
    biases: bool,
) -> None:
    """Decode and prefill, top-k 3, uneven sizes, with one pool and two."""
    sizes = 5, 3, *format.fit(72, 200)
    layer = made(variant, format, function, *sizes, kind=kind, threads=threads, biases=biases)
    check(layer, 1, 5, 40, 260)


@grid(variant=VARIANTS, format=ONE_OF_EACH, function=UNGATED)
def test_an_expert_without_gate_has_no_bytes_of_one(
    variant: Variant, format: Format, function: Function
) -> None:
    """And computes the same bits from packed tiles as from its source."""
    sizes = 3, 2, *format.fit(64, 96)
    gated = made(variant, format, Function("gelu", True), *sizes)
    layer = made(variant, format, function, *sizes)
    module = core.core_with(*variant)
    tiles, size = module.packed_shape(*format.form, layer.inter, layer.hidden)
    assert gated.layer.packed_bytes - layer.layer.packed_bytes == 3 * tiles * size
    batch = layer.batch(9)
    before = layer.forward(*batch)
    for slot in range(layer.experts):
        packed = []
        for matrix in layer.matrices:
            shape = module.packed_shape(*format.form, *layer.shapes[matrix])
            packed.append(np.empty(shape, np.uint8))
            layer.layer.save_packed(slot, matrix, packed[-1])
        layer.layer.load_packed(slot, None, *packed)
    np.testing.assert_array_equal(layer.forward(*batch), before)


@grid(
    variant=VARIANTS,
    format=[f for f in FORMATS if f.code in (BF16, INT8_ROW, INT4_GROUP)],
    function=FEW,
    kind=[VECTOR, TILE],
)
def test_same_bits_for_any_threads_and_batch(
    variant: Variant, format: Format, function: Function, kind: Kind
) -> None:
    outputs = []
    for threads in (1, 3):
        sizes = 5, 3, *format.fit(72, 200)
        layer = made(
            variant, format, function, *sizes, kind=kind, threads=(threads,), max_tokens=16
        )
        x, ids, weights = layer.batch(37)
        outputs.append(layer.forward(x, ids, weights))
        outputs.append(np.concatenate([layer.forward(x[p], ids[p], weights[p]) for p in PARTS]))
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0], other)


PARTS = (slice(0, 1), slice(1, 4), slice(4, 37))


@pytest.mark.parametrize("function", FUNCTIONS, ids=[f.name for f in FUNCTIONS])
def test_the_same_bits_on_all_instruction_sets(function: Function) -> None:
    """In an integer format, as its products are the same bits."""
    outputs = {}
    for variant, kind in itertools.product(VARIANTS, (VECTOR, TILE)):
        if variant.missing:
            continue
        layer = made(variant, Format(INT8_ROW), function, 4, 3, 130, 65, kind=kind)
        outputs[variant, kind] = layer.forward(*layer.batch(23))
    first = next(iter(outputs.values()))
    for where, y in outputs.items():
        np.testing.assert_array_equal(y, first, err_msg=str(where))


def relu2(x: float) -> float:
    return x if math.isnan(x) else max(x, 0.0) ** 2


def sigmoid(x: float) -> float:
    power = math.exp(-abs(x))
    return (power if x < 0 else 1.0) / (1 + power)


# (1 + tanh(y)) / 2 is sigmoid(2 y), which keeps its precision where y is far below 0.
FORMULAS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x * sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    "relu2": relu2,
}


class Single(NamedTuple):
    """A function of one value: of up without a gate; of gate, if up is 1; or of up, where the
    function of the gate is 1."""

    name: str
    function: Function
    formula: Callable[[float], float]
    value: str = "up alone"


SINGLES = [Single(name, Function(name, False), formula) for name, formula in FORMULAS.items()] + [
    Single(
        "situ-gate",
        Function("situ", situ=(4.0, 0.0)),
        lambda x: 4 * math.tanh(x / 4) * sigmoid(x),
        "gate",
    ),
    Single("situ-up", Function("situ", situ=(1.0, 3.0)), lambda x: 3 * math.tanh(x / 3), "up"),
    Single(
        "swiglustep-gate",
        Function("swiglustep", limit=2.0),
        lambda x: min(x * sigmoid(x), 2.0),
        "gate",
    ),
    Single(
        "swiglustep-up",
        Function("swiglustep", limit=40.0),
        lambda x: 40 * min(max(x, -40.0), 40.0),
        "up",
    ),
]


def single_values(variant: Variant, single: Single, x: Floats) -> Floats:
    """The function of each value: the weights are identity matrices, so h and y are that in bf16.
    With one weight, each row is a layer of its own, and so not spoiled by its neighbours."""
    n = 32 if len(x) > 2 else 1
    eye, zero = np.eye(n, dtype=np.float32)[None], np.zeros((1, n, n), np.float32)
    first = {"up alone": [eye], "gate": [eye, zero], "up": [zero, eye]}[single.value]
    constant = {"up alone": [0], "gate": [0, 1], "up": [40, 0]}[single.value]
    bias = [np.full((1, n), np.float32(value)) for value in (*constant, 0)]
    layer = made(
        variant, Format(BF16), single.function, 1, 1, n, n, weights=[*first, eye], bias=bias
    )
    rows = x.reshape(-1, n)
    ids, weights = np.zeros((len(rows), 1)), np.ones((len(rows), 1), np.float32)
    return layer.forward(rows, ids, weights).ravel()


@grid(variant=VARIANTS, single=SINGLES)
def test_single_values(variant: Variant, single: Single) -> None:
    """Every bf16 value of magnitude 2^-100 to 2^60: within one bf16 step of the formula, also where
    it underflows or the cube in gelu_tanh overflows float32."""
    bits = np.arange((127 - 100) << 7, (127 + 60) << 7, dtype=np.uint16)
    x = bf16_values(np.concatenate([bits, bits | np.uint16(0x8000)])).astype(np.float32)
    exact = np.array([single.formula(float(v)) for v in x])
    y = single_values(variant, single, x)
    assert not np.isnan(y).any()
    np.testing.assert_array_less(np.abs(y - exact), 1.01 * 2.0**-8 * np.abs(exact) + 1e-36)


@grid(
    variant=VARIANTS,
    format=[Format(BF16), Format(INT8_ROW), Format(INT4_GROUP, 32)],
    kind=[VECTOR, TILE],
    function=FEW,
    bad=[np.nan, np.inf, -np.inf],
)
def test_a_bad_row_stays_alone(
    variant: Variant, format: Format, kind: Kind, function: Function, bad: float
) -> None:
    """A NaN gives a row of NaN; nothing reaches the other rows."""
    layer = made(variant, format, function, 3, 2, 64, 64, kind=kind)
    x, ids, weights = layer.batch(18)
    ids = np.abs(ids) % 3
    clean = layer.forward(x, ids, weights)
    x[5, 7] = bad
    y = layer.forward(x, ids, weights)
    if np.isnan(bad):
        assert np.isnan(y[5]).all()
    others = np.arange(18) != 5
    np.testing.assert_array_equal(y[others], clean[others])


def test_infinities() -> None:
    """An activation of -inf is NaN, as inf * 0 is, but for relu2. Functions with a gate get the
    largest float32, as the other weight, 0, would make NaN of an infinity."""
    most = {"situ-gate": (4, 0), "situ-up": (3, -3), "relu2": (np.inf, 0)}
    most |= {"swiglustep-gate": (2, 0), "swiglustep-up": (1600, -1600)}
    for single in SINGLES:
        large = np.float32(np.inf if single.value == "up alone" else 3e38)
        y = single_values(Variant("_C", "avx2"), single, np.array([large, -large]))
        np.testing.assert_array_equal(y, most.get(single.name, (np.inf, np.nan)), single.name)


WRONG = [
    (dict(activation=6), "activation 6; accepted: 0 to 5"),
    (dict(activation=-1), "activation -1; accepted: 0 to 5"),
    (dict(activation=1, swiglu_limit=7.0), r"swiglu_limit 7\.0.*this activation has none"),
    (dict(gated=False, swiglu_alpha=1.5), r"swiglu_alpha 1\.5.*this activation has none"),
    (dict(activation=5, swiglu_alpha=1.5), r"swiglu_alpha 1\.5.*this activation has none"),
    (dict(activation=4, gated=False), "gated 0; activation 4 needs a gate; accepted: 1"),
    (dict(activation=4, situ_beta=0.0), r"situ_beta 0\.0.*; accepted: more than 0"),
]


@pytest.mark.parametrize("wrong,message", WRONG)
def test_settings_that_do_not_fit_are_refused(wrong: dict[str, Any], message: str) -> None:
    good = dict(
        num_experts=2,
        top_k=1,
        hidden_size=64,
        intermediate_size=64,
        forms=[(BF16, 0, 0)] * 3,
        cpu_slots=[True] * 2,
        swiglu_limit=0.0,
        swiglu_alpha=0.0,
        max_tokens=8,
        table="avx2",
        kind=0,
    )
    module = core.core_with("_C", "avx2")
    with pytest.raises(ValueError, match=message):
        module.MoeLayer(core.team("_C", (1,)), **{**good, **wrong})


def test_a_gate_of_experts_without_one_is_refused() -> None:
    layer = made(Variant("_C", "avx2"), Format(BF16), UNGATED[0], biases=True)
    one = np.zeros((layer.inter, layer.hidden), np.float32)
    source, nothing = (one.ctypes.data, 0, 0, 1.0), (0, 0, 0, 1.0)
    up, down = (core.sources.address_of(w[0]) for w in layer.weights)
    with pytest.raises(ValueError, match="slot 0, gate: these experts have none"):
        layer.layer.load(0, source, up, down, dtypes=[2] * 3)
    with pytest.raises(ValueError, match="slot 0, gate: these experts have none"):
        layer.layer.load(0, nothing, up, down, one.ctypes.data, dtypes=[-1, 2, 2])
    with pytest.raises(ValueError, match="slot 0, up: address 0"):
        layer.layer.load(0, nothing, nothing, down, dtypes=[-1, 2, 2])
    with pytest.raises(ValueError, match="matrix 0; accepted: 1 to 2"):
        layer.layer.unpack(0, 0, one)
    with pytest.raises(ValueError, match="gate: address 0"):
        made(Variant("_C", "avx2"), Format(BF16), Function("gelu", True)).layer.load(
            0, nothing, up, down, dtypes=[-1, 2, 2]
        )


def test_training_accepts_swiglu_only() -> None:
    for function in FUNCTIONS:
        base = made(Variant("_C", "avx2"), Format(BF16), function).layer
        with pytest.raises(ValueError, match="training accepts"):
            core.core_with("_C", "avx2").SftLayer(
                base,
                rank=8,
                scaling=1.0,
                dropout=0.0,
                max_cache_depth=1,
                recompute=False,
                skip_lora_grads=False,
                full_weight_grad=False,
            )
