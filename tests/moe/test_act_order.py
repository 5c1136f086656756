"""Matrices whose columns come in another order than their own (GPTQ's desc_act)."""

import dataclasses
import re

import pytest
import torch
from moe_cases import Case, within

from kt_kernel.testing import quantise, values_of


class OrderedCase(Case):
    """Every matrix has an order, or only those named do."""

    def __init__(self, *named, shared=False, **settings):
        self.named, self.shared = named or ("gate", "up", "down"), shared
        super().__init__(**settings)
        self._sources = []
        for name, every in zip(
            ("gate", "up", "down"), (self.gate, self.up, self.down), strict=True
        ):
            self._sources.append([self.reordered(name, e, w) for e, w in enumerate(every)])

    def reordered(self, name, expert, w):
        if name not in self.named:
            return quantise(w, self.form)
        seed = expert if self.shared else 100 * len(name) + expert
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(w.shape[1], generator=generator)
        return dataclasses.replace(quantise(w[:, order], self.form), order=order.int())

    @property
    def sources(self):
        return self._sources


@pytest.mark.parametrize("method", ["GPTQ_INT4", "RAWINT4:zero"])
@pytest.mark.parametrize("named", [(), ("down",), ("gate", "up"), ("up",)])
@pytest.mark.parametrize("shared", [False, True])
def test_against_the_oracle(method, named, shared):
    case = OrderedCase(
        *named,
        shared=shared,
        method=method,
        hidden=128,
        inter=64,
        biases=True,
        mapping=torch.tensor([4, 0, 0, 2, 1, 5]),
    )
    wrapper = case.wrapper(threadpool_count=2)
    for tokens in (1, 4, 50):
        batch = case.batch(tokens)
        assert within(wrapper.forward(*batch), *case.reference_with_noise(*batch))


def test_the_same_as_the_matrix_in_its_own_order():
    """W of one group is the same in any order: so are the results but for sums of float32."""
    case = Case(method="GPTQ_INT4", hidden=64, inter=64)
    plain = case.wrapper()
    generator = torch.Generator().manual_seed(3)
    made = []
    for every in case.sources:
        made.append([])
        for matrix in every:
            order = torch.randperm(64, generator=generator)
            codes = torch.stack([matrix.codes & 15, matrix.codes >> 4], -1).flatten(1)[:, order]
            packed = codes[:, 0::2] | codes[:, 1::2] << 4
            made[-1].append(dataclasses.replace(matrix, codes=packed, order=order.int()))
            assert torch.equal(values_of(made[-1][-1]), values_of(matrix))
    wrapper = case.wrapper(load=False)
    wrapper.load_weights_from_tensors(*made, case.mapping)
    batch = case.batch(20)
    assert torch.allclose(wrapper.forward(*batch), plain.forward(*batch), rtol=1e-2, atol=1e-3)


CASE = Case(method="GPTQ_INT4", inter=64)


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (torch.arange(63, dtype=torch.int32), "up_proj of slot 1.order must be [64], got [63]"),
        (torch.arange(64), "up_proj of slot 1.order has dtype torch.int64; accepted: int32"),
        (
            torch.arange(64, dtype=torch.int32) - 1,
            "up_proj of slot 1.order must have every column from 0 to 63 once; 0 is missing",
        ),
        (
            torch.arange(64, dtype=torch.int32).clamp(max=62),
            "order must have every column from 0 to 63 once; 63 is missing or repeated",
        ),
        (torch.full((64,), 2**31 - 1, dtype=torch.int32), "every column from 0 to 63 once"),
    ],
)
def test_orders_that_are_none(order, text):
    gate, up, down = (every[1] for every in CASE.sources)
    with pytest.raises(ValueError, match=re.escape(text)):
        CASE.wrapper(load=False).load_expert(1, gate, dataclasses.replace(up, order=order), down)


def test_formats_without_groups_have_no_order():
    case = Case(method="MXFP4")
    gate, up, down = (every[1] for every in case.sources)
    up = dataclasses.replace(up, order=torch.arange(64, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"up_proj of slot 1.order must be None for MXFP4"):
        case.wrapper(load=False).load_expert(1, gate, up, down)
