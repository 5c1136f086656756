"""Layers whose gate, up and down differ in form, and weights that may come dense or quantised."""

import re

import pytest
import torch
from moe_cases import Case, within

from kt_kernel.moe import tuning
from kt_kernel.moe.tuning import Tuning
from kt_kernel.testing import quantise
from kt_kernel.testing.quantised import pack_nibbles
from kt_kernel.weights import methods
from kt_kernel.weights.formats import (
    BF16,
    FP8_ROW,
    INT4_GROUP,
    INT4_ROW,
    INT4_ZERO,
    INT8_ROW,
    MXFP4,
    LayerForm,
    WeightForm,
)
from kt_kernel.weights.methods import Method
from kt_kernel.weights.quantised import QuantisedMatrix

MIXED = Method("MIXED", (INT4_GROUP, MXFP4, INT4_ZERO), quantised=True, mixed=True)
DENSE = None  # in the place of a form
G32, G64, ZERO, FP4 = (
    WeightForm(INT4_GROUP, 32),
    WeightForm(INT4_GROUP, 64, 1),
    WeightForm(INT4_ZERO, 32, 2),
    WeightForm(MXFP4),
)
MIXES = [
    (G32, ZERO, FP4),
    (G64, G32, G32),
    (DENSE, FP4, G64),
    (G32, G32, DENSE),
    (FP4, DENSE, DENSE),
    (DENSE, DENSE, DENSE),
    (FP4, FP4, FP4),
]


@pytest.fixture(autouse=True)
def mixed_method(monkeypatch):
    monkeypatch.setitem(methods.METHODS, "MIXED", MIXED)


class MixedCase(Case):
    """forms: of gate, up and down; DENSE for tensors."""

    def __init__(self, *forms, **settings):
        self.forms = forms
        super().__init__(method="AMXINT8", **settings)
        self.method = "MIXED"

    @property
    def sources(self):
        return [
            list(every) if form is DENSE else [quantise(matrix, form) for matrix in every]
            for every, form in zip((self.gate, self.up, self.down), self.forms, strict=True)
        ]


@pytest.mark.parametrize("forms", MIXES, ids=lambda forms: "-".join(map(str, forms)))
@pytest.mark.parametrize("kind", ["auto", "vector", "tile"])
def test_against_the_oracle(forms, kind, monkeypatch):
    if kind != "auto":
        monkeypatch.setenv("KT_KERNEL_KIND", kind)
    case = MixedCase(*forms, inter=64, biases=True, mapping=torch.tensor([4, 0, 0, 2, 1, 5]))
    by_list = case.wrapper(threadpool_count=2)
    one_by_one = case.wrapper(load=False, threadpool_count=2)
    for slot in range(case.experts):
        logical = int(case.mapping[slot])
        one_by_one.load_expert(
            slot,
            *(every[logical] for every in case.sources),
            **{name: bias[logical] for name, bias in case.bias.items()},
        )
    one_by_one.finish_loading()
    for tokens in (1, 3, 40):
        batch = case.batch(tokens)
        y = by_list.forward(*batch)
        assert within(y, *case.reference_with_noise(*batch, kind=kind))
        assert torch.equal(one_by_one.forward(*batch), y)


def test_stacked_tensors_beside_matrices():
    case = MixedCase(DENSE, FP4, G32)
    _, up, down = case.sources
    wrapper = case.wrapper(load=False)
    wrapper.load_weights_from_tensors(case.gate, up, down, case.mapping)
    batch = case.batch(5)
    assert torch.equal(wrapper.forward(*batch), case.wrapper().forward(*batch))
    assert wrapper._form == LayerForm(WeightForm(BF16), FP4, G32)


@pytest.mark.parametrize(
    ("which", "expert", "form", "text"),
    [
        (1, 3, G64, r"up_proj\[3\] is .*group size 64\), but up_proj\[0\] is .*group size 32\)"),
        (1, 3, DENSE, r"up_proj\[3\] is BF16, but up_proj\[0\] is int4"),
        (0, 2, FP4, r"gate_proj\[2\] is MXFP4, but gate_proj\[0\] is BF16"),
        (2, 5, WeightForm(FP8_ROW), r"down_proj\[5\] is FP8 with row scales; accepted: int4 .* or"),
    ],
)
def test_experts_of_other_forms(which, expert, form, text):
    case = MixedCase(DENSE, G32, FP4)
    given = case.sources
    matrix = (case.gate, case.up, case.down)[which][expert]
    given[which][expert] = matrix if form is DENSE else quantise(matrix, form)
    with pytest.raises(ValueError, match=f"^layer 0: {text}"):
        case.wrapper(load=False).load_weights_from_tensors(*given, case.mapping)
    wrapper = case.wrapper(load=False)
    if which < 2:
        wrapper.load_expert(0, *(every[0] for every in case.sources))
        with pytest.raises(ValueError, match=f"slot {expert} is gate .*; slots loaded before are"):
            wrapper.load_expert(expert, *(every[expert] for every in given))


def test_neither_a_tensor_nor_a_matrix():
    case = MixedCase(DENSE, FP4, G32)
    gate, up, down = case.sources
    text = "gate_proj of slot 0 must be a tensor or a QuantisedMatrix, got list"
    with pytest.raises(TypeError, match=text):
        case.wrapper(load=False).load_expert(0, gate, up[0], down[0])
    text = "up_proj must be a sequence of 6 tensors or QuantisedMatrix for method MIXED, got Quant"
    with pytest.raises(TypeError, match=text):
        case.wrapper(load=False).load_weights_from_tensors(gate, up[0], down, case.mapping)


def test_sizes_are_checked_by_matrix():
    """H = 64 suits all of these; I = 32 only those of down."""
    case = MixedCase(G64, FP4, G32, hidden=64, inter=32)
    case.wrapper()
    case = MixedCase(G64, FP4, G64, hidden=64, inter=64)
    case.inter = 32
    case.gate, case.up, case.down = case.gate[:, :32], case.up[:, :32], case.down[..., :32]
    case.forms = (G64, FP4, G32)
    case.wrapper()


def test_each_matrix_has_its_own_tuning(monkeypatch):
    found = {G32: Tuning(5, 128), FP4: Tuning(9, 64), WeightForm(BF16): Tuning(2, 256)}
    monkeypatch.setattr(tuning, "tuning_for", lambda form, table: found[form])
    form = LayerForm(WeightForm(BF16), FP4, G32)
    assert tuning.layer_tuning(form, "avx2") == {"gemm_min_rows": [2, 9, 5], "row_block": 64}


def test_text_of_a_form():
    assert str(LayerForm.same(FP4)) == "MXFP4"
    assert str(LayerForm(FP4, FP4, G32)).startswith("gate MXFP4, up MXFP4, down int4 with group")


# ---- integers with row scales, from other tools -----------------------------------------------


@pytest.mark.parametrize("method", ["AMXINT8", "MOE_INT8", "AMXINT4", "MOE_INT4"])
@pytest.mark.parametrize("quantised", [(0, 1, 2), (1,), (0, 2)])
def test_row_scales_dense_or_quantised(method, quantised):
    """A QuantisedMatrix in the place of any dense matrix is taken over as it is."""
    format, largest = (INT8_ROW, 127) if "INT8" in method else (INT4_ROW, 7)
    case = Case(method=method, dtype=torch.float32)
    made, dense = [], []
    for every in (case.gate, case.up, case.down):  # weights that quantise without an error
        codes = (every * 40).round().clamp(-largest, largest)
        codes[..., 0] = largest
        scale = torch.full(codes.shape[:2], 2.0**-7)
        dense.append(codes * 2.0**-7)
        packed = [q.to(torch.int8) if largest == 127 else pack_nibbles(q + 8) for q in codes]
        made.append([QuantisedMatrix(format, *one) for one in zip(packed, scale, strict=True)])
    given = [made[m] if m in quantised else list(dense[m]) for m in range(3)]
    case.gate, case.up, case.down = dense
    plain, wrapper = case.wrapper(), case.wrapper(load=False)
    wrapper.load_weights_from_tensors(*given, case.mapping)
    batch = case.batch(7)
    assert torch.equal(wrapper.forward(*batch), plain.forward(*batch))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda m: m.codes.short(),
            "gate_proj of slot 0.codes has dtype torch.int16; accepted: int8",
        ),
        (lambda m: m.codes[:, 1:], r"gate_proj of slot 0.codes must be \[32, 64\], got \[32, 63\]"),
    ],
)
def test_wrong_codes(change, text):
    case = Case(method="AMXINT8")
    gate = quantise(case.gate[0], WeightForm(INT8_ROW))
    object.__setattr__(gate, "codes", change(gate))
    with pytest.raises(ValueError, match=text):
        case.wrapper(load=False).load_expert(0, gate, case.up[0], case.down[0])


def test_another_form_of_integers():
    case = Case(method="AMXINT8")
    gate = quantise(case.gate[0], WeightForm(INT4_ROW))
    with pytest.raises(ValueError, match=re.escape("int4 with row scales; accepted: int8 with")):
        case.wrapper(load=False).load_expert(0, gate, case.up[0], case.down[0])
