"""The layer's output against the float64 oracle, over methods, kernels, shapes and batch sizes.

Rows are compared with the bound that the oracle gives with them (see moe_reference_with_noise),
so that a rounding of h that goes the other way is told from an error.
"""

import functools

import pytest
import torch
from grid import examples, grid
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import ALL_METHODS, KERNEL_METHODS, Case, form_of_case, within

from kt_kernel import _C
from kt_kernel.moe.activation import ACTIVATIONS
from kt_kernel.testing import folds_scales, quantise_weights, row_error
from kt_kernel.testing.rounding import kernel_errors

TABLES = _C.kernel_tables()
TOKENS = [*range(34), 512]
FEW_TOKENS = [0, 1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 512]
# By what H and I must be multiples of.
SHAPES = {
    1: [(33, 97), (61, 64), (1, 33), (2880, 45)],
    16: [(16, 48), (2880, 16), (80, 176)],
    32: [(32, 64), (2880, 32), (96, 160)],
    64: [(64, 192), (2880, 64)],
    128: [(128, 256), (384, 128)],
}


def shapes_of(method):
    return SHAPES[form_of_case(method).column_unit]


@functools.lru_cache(maxsize=4)
def layer(method, shape):
    """A layer with a mask and a map, and 512 tokens for it."""
    case = Case(
        hidden=shape[0], inter=shape[1], method=method, mapping=torch.tensor([5, 0, 2, 2, 1, 3])
    )
    case.options = {"gpu_experts_mask": torch.arange(6) == 3, "chunked_prefill_size": 200}
    hidden, ids, weights = case.batch(512, torch.bfloat16)
    ids[5:9] = torch.tensor([[-1, 3, 6], [2, 2, 2], [0, 0, 4], [1, 2, 4]])
    return case, (hidden, ids, weights)


_answers = {}


def problem(method, shape, kind="auto", table=None):
    """A layer, its tokens, and the oracle's answer for kernels of a kind: what takes most of the
    time, and is the same for all kernels that add the same errors."""
    case, batch = layer(method, shape)
    key = (method, shape, *kernel_errors({case.form.format}, kind, table))
    if key not in _answers:
        if len(_answers) == 8:
            del _answers[next(iter(_answers))]
        _answers[key] = case.reference_with_noise(*batch, kind=kind, table=table)
    return case, batch, _answers[key]


# The best table and the least. The others have parts of their kernels: for them the kinds are
# enough, and for the other names and forms of a format the best table is.
WHOLE = (TABLES[0], "avx2")
ALL_SHAPES = sorted({shape for shapes in SHAPES.values() for shape in shapes})


def is_run(case):
    return (
        case.shape in shapes_of(case.method)
        and (case.method in KERNEL_METHODS or case.table == TABLES[0])
        and (case.table in WHOLE or case.kind != "auto")
    )


def kernel(case):
    """Every method with every kernel it has, in a shape or other."""
    return case.method, case.table, case.kind


def pinned(monkeypatch, table, kind):
    monkeypatch.setenv("KT_KERNEL_CPU_VARIANT", table)
    monkeypatch.setenv("KT_KERNEL_KIND", "" if kind == "auto" else kind)


@grid(
    method=ALL_METHODS,
    shape=ALL_SHAPES,
    table=TABLES,
    kind=["vector", "tile", "auto"],
    where=is_run,
    goals=[kernel],
)
def test_against_the_oracle(method, shape, table, kind, monkeypatch):
    pinned(monkeypatch, table, kind)
    case, (hidden, ids, weights), (reference, noise) = problem(method, shape, kind, table)
    # The products of 4-bit weights and scales, rounded to bf16, are as far off as h is.
    most = 8e-3 if folds_scales(case.form.format, kind, table) else 5e-3
    wrapper = case.wrapper()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = hidden.to(dtype)
        # fp16 cannot hold all bf16 values; compare it where nothing was lost
        same = (x.double() == hidden.double()).all(-1)
        whole = wrapper.forward(x, ids, weights)
        assert within(whole[same], reference[same], noise[same])
        assert bool((whole[5] == 0).all())
        if dtype == torch.bfloat16 and shape[0] > 1 and shape[1] >= 32:
            error = row_error(whole, reference)
            assert bool((error <= most + noise / reference.norm(dim=-1).clamp(1e-30)).all())
            assert (error <= most).double().mean() >= 0.99
        if dtype != torch.float32:
            continue
        for tokens in TOKENS if table in WHOLE else FEW_TOKENS:
            y = wrapper.forward(x[:tokens], ids[:tokens], weights[:tokens])
            if kind == "auto":
                assert within(y, reference[:tokens], noise[:tokens]), tokens
            else:  # same bits for any T with the kind pinned
                assert torch.equal(y, whole[:tokens]), tokens


@pytest.mark.parametrize("method", KERNEL_METHODS)
def test_the_bound_would_notice(method, monkeypatch):
    """Most rows have no h next to a tie, and an error of 2e-4 in one column is seen in them."""
    monkeypatch.setenv("KT_KERNEL_KIND", "vector")
    case, batch, (reference, noise) = problem(method, shapes_of(method)[0], "vector")
    size = reference.norm(dim=-1)
    used = size > 0
    assert (noise[used] < 1e-4 * size[used]).double().mean() > 0.6
    y = case.wrapper().forward(batch[0].float(), *batch[1:])
    assert within(y, reference, noise)
    y[:, 0] += 2.5e-4 * size
    clear = used & (noise < 1e-4 * size)
    assert not any(
        within(y[i : i + 1], reference[i : i + 1], noise[i : i + 1])
        for i in clear.nonzero().flatten().tolist()
    )


@pytest.mark.parametrize("method", [m for m in ALL_METHODS if not m.startswith("MOE")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_packed_weights_are_those_of_the_rules(method, dtype):
    for shape in shapes_of(method)[:2]:
        case = Case(method=method, hidden=shape[0], inter=shape[1], dtype=dtype, experts=2, k=1)
        case.gate[0, 0] = 0  # a scale of zero
        case.up[1] *= 1e-3
        for pools in (1, 3):
            core = case.wrapper(cpuinfer_threads=3, threadpool_count=pools)._core
            for number, matrices in enumerate(case.sources):
                for slot in range(2):
                    wanted = quantise_weights(case.method, matrices[slot]).float()
                    unpacked = torch.empty(wanted.shape)
                    core.unpack(slot, number, unpacked.numpy())
                    assert torch.equal(unpacked, wanted)


@grid(
    method=KERNEL_METHODS,
    shape=ALL_SHAPES,
    table=TABLES,
    where=lambda case: case.shape in shapes_of(case.method)[:2],
)
def test_same_bits_for_any_number_of_threads(method, shape, table, monkeypatch):
    pinned(monkeypatch, table, "auto")
    case, batch, (reference, noise) = problem(method, shape)
    outputs = [case.wrapper(cpuinfer_threads=n).forward(*batch) for n in (1, 2, 3, 7)]
    for output in outputs[1:]:
        assert torch.equal(output, outputs[0])
    for pools in (2, 3):  # more pools than this machine may have nodes
        parts = [
            case.wrapper(cpuinfer_threads=n, threadpool_count=pools).forward(*batch)
            for n in (pools, pools, 7)
        ]
        assert torch.equal(parts[0], parts[1])
        for part in parts:
            assert within(part, reference, noise)


@pytest.mark.parametrize("table", TABLES)
def test_layers_that_share_buffers_leave_nothing_in_them(table, monkeypatch):
    pinned(monkeypatch, table, "auto")
    cases = [
        Case(method=method, hidden=shape[0], inter=shape[1])
        for method in KERNEL_METHODS
        for shape in shapes_of(method)[:3]
    ]
    batches = [case.batch(64, torch.bfloat16) for case in cases]
    # The bits do not depend on threads; no other team has five.
    alone = [
        case.wrapper(cpuinfer_threads=5).forward(*batch)
        for case, batch in zip(cases, batches, strict=True)
    ]
    wrappers = [case.wrapper() for case in cases]
    for order in (range(len(cases)), reversed(range(len(cases)))):
        for i in order:
            hidden, ids, weights = batches[i]
            wrappers[i].forward(torch.full_like(hidden, torch.nan), ids, weights)
            for j in (i, (i + 1) % len(cases), (i + 5) % len(cases)):
                assert torch.equal(wrappers[j].forward(*batches[j]), alone[j]), (i, j)


@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_any_layer(data):
    draw = data.draw
    method = draw(st.sampled_from([m for m in ALL_METHODS if form_of_case(m).column_unit < 128]))
    unit = form_of_case(method).column_unit
    experts, gated = draw(st.integers(1, 5)), draw(st.booleans())
    order = draw(st.lists(st.integers(0, experts - 1), min_size=experts, max_size=experts))
    case = Case(
        experts=experts,
        k=draw(st.integers(1, 4)),
        hidden=unit * draw(st.integers(1, 3 if unit > 1 else 99)),
        inter=unit * draw(st.integers(1, 3 if unit > 1 else 99)),
        method=method,
        seed=draw(st.integers(0, 999)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        biases=draw(st.booleans()),
        mapping=torch.tensor(order),
        options={"gated": gated},
    )
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=experts, max_size=experts)))
    act = {
        "activation": draw(st.sampled_from(ACTIVATIONS[: 6 if gated else 4])),
        "apply_router_weight_on_input": draw(st.booleans()),
    }
    if act["activation"] == "silu" and gated:
        act["swiglu_limit"] = draw(st.sampled_from([0.0, 0.5]))
        act["swiglu_alpha"] = draw(st.sampled_from([0.0, 1.702]))
    wrapper = case.wrapper(
        gpu_experts_mask=mask,
        cpuinfer_threads=draw(st.integers(1, 3)),
        chunked_prefill_size=draw(st.sampled_from([-1, 1, 7])),
        **act,
    )
    tokens = draw(st.integers(0, 40))
    hidden, ids, weights = case.batch(
        tokens, draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    )
    weights = weights - 0.3
    reference, noise = case.reference_with_noise(hidden, ids, weights, gpu_experts_mask=mask, **act)
    assert within(wrapper.forward(hidden, ids, weights), reference, noise)
