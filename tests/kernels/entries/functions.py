"""Functions of the module, and the construction of a kernel benchmark."""

from __future__ import annotations

import numpy as np

from kt_kernel.weights.formats import all_formats

from ..ggml import Q4_1
from ..sources import BF16, INT4_ZERO
from .case import Case
from .specs import Array, Flag, Number, Real, Some, Text
from .things import (
    EXPERTS,
    HIDDEN,
    INTER,
    MAX,
    NONE,
    TOKENS,
    TOP_K,
    Things,
    at,
    weight_format,
)


def function_cases(t: Things) -> dict[str, list[Case]]:
    core = t.core
    format, no_group, scale_type = weight_format(BF16), Number(0, 0, 0), Number(0, 0, 2)
    not_dense = [  # need groups or scales, or blocks of more than 128 columns
        f.id
        for f in all_formats()
        if f.grouped or f.column_unit > 128 or not (f.from_dense or f.ggml)
    ]
    sizes = dict(n=Number(64, 1, 1 << 16), k=Number(128, 1, 1 << 16))
    open_sizes = dict(n=Number(64, 1, 1 << 16, True), k=Number(128, 1, 1 << 16, True))
    table, gemm = Text("avx2"), Flag(False)
    dtype = dict(dtype=Number(2, -1, 2), scale_search=Flag(False))
    grouped = dict(format=weight_format(INT4_ZERO), group_size=Number(32, 32, 32))
    codes = (at(t.codes), at(t.scale, "scales"), at(t.zero, "zero points"), Real(1.0))
    blocks = (at(t.blocks), NONE, NONE, Real(1.0))
    ggml = dict(format=weight_format(Q4_1), group_size=no_group)
    x64, w64 = np.ones((TOKENS, HIDDEN)), np.ones((EXPERTS, INTER, HIDDEN))
    products = dict(table=table, gemm=gemm, scale_type=scale_type, x=Array(t.w[:TOKENS], free=(0,)))
    return {
        "cpu_features": [Case(core.cpu_features)],
        "cpu_brand": [Case(core.cpu_brand)],
        "kernel_tables": [Case(core.kernel_tables)],
        "kernels": [Case(core.kernels)],
        "topology": [Case(core.topology)],
        "cpu_quota": [Case(core.cpu_quota)],
        "probe_read_bandwidth": [
            Case(core.probe_read_bandwidth, max_threads=Number(1, 1, 4096)),
        ],
        "packed_shape": [
            Case(
                core.packed_shape,
                format=format,
                group_size=no_group,
                scale_type=scale_type,
                **open_sizes,
            ),
            Case(
                core.packed_shape,
                scale_type=scale_type,
                **grouped,
                **sizes,
                extra=[(dict(group_size=g), ValueError) for g in (48, 256)],
            ),
        ],
        "pack": [
            Case(
                core.pack,
                format=format,
                group_size=no_group,
                scale_type=scale_type,
                w=t.dense,
                **sizes,
                **dtype,
                extra=[(dict(format=f), ValueError) for f in not_dense],
            ),
            Case(core.pack, scale_type=scale_type, w=codes, **grouped, **sizes, **dtype),
            Case(core.pack, scale_type=scale_type, w=blocks, **ggml, **sizes, **dtype),
        ],
        "unpack": [
            Case(
                core.unpack,
                format=format,
                group_size=no_group,
                scale_type=scale_type,
                tiles=Array(t.tiles[0]),
                n=Number(INTER, 1, 1 << 16),
                k=Number(HIDDEN, 1, 1 << 16),
            ),
        ],
        "product": [
            Case(
                core.product,
                table=table,
                gemm=gemm,
                format=format,
                group_size=no_group,
                w=Array(t.w, free=(0,)),
                x=Array(t.w[:TOKENS], free=(0,)),
                extra=[(dict(format=3, group_size=g), ValueError) for g in (0, -32, 48, 256)],
            ),
        ],
        "product_quantised": [
            Case(core.product_quantised, w=codes, n=sizes["n"], **grouped, **products),
            Case(core.product_quantised, w=blocks, n=sizes["n"], **ggml, **products),
        ],
        "reference_forward": [
            Case(
                core.reference_forward,
                x=Array(x64),
                ids=Array(t.ids),
                weights=Array(np.ones((TOKENS, TOP_K))),
                gate=Array(w64, optional=True),
                up=Array(w64),
                down=Array(np.ones((EXPERTS, HIDDEN, INTER))),
                activation_format=Number(0, 0, 1),
                skip=[Flag(False)] * EXPERTS,
                gate_bias=Array(np.ones((EXPERTS, INTER)), optional=True),
                up_bias=Array(np.ones((EXPERTS, INTER)), optional=True),
                down_bias=Array(np.ones((EXPERTS, HIDDEN)), optional=True),
                swiglu_limit=Real(0.0),
                swiglu_alpha=Real(0.0),
                activation=Text("silu"),
                weight_on_input=Flag(False),
                situ_beta=Real(1.0),
                situ_linear_beta=Real(0.0),
                extra=[(dict(skip=[False]), ValueError)],
            ),
        ],
        "split_deferred": [
            Case(
                core.split_deferred,
                ids=Array(t.ids),
                weights=Array(t.router),
                protected_k=Number(1, -MAX - 1, MAX, True),
                num_experts=Number(EXPERTS, 1, (1 << 24) - 1, True),
            ),
        ],
        "ProductBench()": [
            Case(
                core.ProductBench,
                team=Some(t.team),
                table=table,
                gemm=gemm,
                format=format,
                group_size=no_group,
                scale_type=scale_type,
                w=t.dense,
                bytes=Number(1, 1, 1 << 44),
                **sizes,
            ),
        ],
    }
