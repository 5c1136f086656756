"""Teams, layers, passes under way, and kernel benchmarks."""

from __future__ import annotations

import numpy as np

from .case import Case, NoConstructor
from .specs import Array, Flag, Number, good
from .things import (
    BF16,
    EXPERTS,
    HIDDEN,
    INTER,
    NONE,
    TOKENS,
    Things,
    at,
)


def layer_cases(t: Things) -> dict[str, list[Case]]:
    core, layer = t.core, t.layer
    slot, matrix, dtypes = Number(0, 0, EXPERTS - 1), Number(0, 0, 2), [Number(2, -1, 2)] * 3
    bench = core.ProductBench(
        t.team,
        table="avx2",
        gemm=False,
        format=BF16,
        group_size=0,
        scale_type=0,
        n=64,
        k=128,
        w=good(t.dense),
        bytes=1,
    )
    bench.set_rows(t.w)
    ticket = t.submit(x_ptr=0, dtype=0, tokens=0, ids_ptr=0, weights_ptr=0, out_ptr=0)
    experts = [(slot, [t.dense] * 3, dtypes, [NONE] * 3, [NONE] * 2)]
    orders = [
        (dict(orders=pair), ValueError)
        for bad in t.bad_orders
        for pair in ((bad.ctypes.data, 0), (0, bad.ctypes.data))
    ]
    return {
        "Team()": [
            Case(core.Team, threads=[Number(1, 1, 4096)], nodes=[Number(-1, -1, 65535)]),
            Case(
                core.Team,
                threads=[Number(3, 3, 4096), Number(1, 0, 4096)],
                nodes=[Number(-1, -1, 65535)] * 2,
                reserves=[Number(2, 0, 2), Number(0, 0, 0)],
                extra=[(dict(reserves=[1]), ValueError)],
            ),
            Case(
                core.Team,
                threads=[Number(1, 0, 4095)] * 2,
                nodes=[Number(0, -1, 65535)] * 2,
                extra=[
                    (dict(threads=[4096, 4096]), ValueError),
                    (dict(threads=[0, 0]), ValueError),
                ],
            ),
        ],
        "Team.pools": [Case(lambda: t.team.pools)],
        "Team.threads": [Case(lambda: t.team.threads)],
        "Ticket()": [NoConstructor(core.Ticket)],
        "Ticket.wait": [Case(ticket.wait)],
        "Ticket.done": [Case(lambda: ticket.done)],
        "MoeLayer()": [
            Case(
                core.MoeLayer,
                **t.layer_specs(),
                extra=[
                    (dict(row_block=8), ValueError),
                    (dict(cpu_slots=[True]), ValueError),
                    (dict(top_k=1 << 16, max_tokens=1 << 16), ValueError),
                ],
            ),
        ],
        "MoeLayer.load": [
            Case(
                layer.load,
                slot=slot,
                gate=t.dense,
                up=t.dense,
                down=t.dense,
                gate_bias_ptr=NONE,
                up_bias_ptr=NONE,
                down_bias_ptr=NONE,
                dtypes=dtypes,
                orders=[NONE] * 2,
                scale_search=Flag(False),
                extra=orders,
            ),
        ],
        "MoeLayer.load_many": [
            Case(
                layer.load_many,
                experts=experts,
                scale_search=Flag(False),
                extra=[(dict(experts=good(experts * 2)), ValueError)],
            ),
        ],
        "MoeLayer.load_packed": [
            Case(
                t.new_layer().load_packed,
                slot=slot,
                gate=Array(t.tiles[0], flat=True, exact=True),
                up=Array(t.tiles[1], flat=True, exact=True),
                down=Array(t.tiles[2], flat=True, exact=True),
                gate_bias=Array(t.bias[:INTER], exact=True, optional=True),
                up_bias=Array(None, optional=True),
                down_bias=Array(t.bias[:HIDDEN], exact=True, optional=True),
            ),
        ],
        "MoeLayer.save_packed": [
            Case(
                layer.save_packed,
                slot=slot,
                matrix=matrix,
                dst=Array(t.tiles[0], flat=True, exact=True),
            ),
        ],
        "MoeLayer.submit": [
            Case(
                t.submit,
                x_ptr=at(t.x),
                dtype=Number(2, 0, 2),
                tokens=Number(TOKENS, 0, (1 << 31) - 1),
                ids_ptr=at(t.ids),
                weights_ptr=at(t.router),
                out_ptr=at(t.y),
                add_ptr=NONE,
                partial_ptr=NONE,
            ),
        ],
        "MoeLayer.set_cpu_slots": [
            Case(
                layer.set_cpu_slots,
                cpu_slots=[Flag(True)] * EXPERTS,
                extra=[
                    (dict(cpu_slots=[]), ValueError),
                    (dict(cpu_slots=[True] * (EXPERTS + 1)), ValueError),
                ],
            ),
        ],
        "MoeLayer.unpack": [
            Case(
                layer.unpack,
                slot=slot,
                matrix=matrix,
                dst=Array(np.ones((INTER, HIDDEN), np.float32), exact=True),
            ),
        ],
        "MoeLayer.packed_parts": [Case(layer.packed_parts)],
        "MoeLayer.positions": [Case(lambda: layer.positions)],
        "MoeLayer.has_column_orders": [Case(lambda: layer.has_column_orders)],
        "MoeLayer.has_biases": [Case(lambda: layer.has_biases)],
        "MoeLayer.biases": [
            Case(
                layer.biases,
                matrix=matrix,
                dst=Array(np.ones((EXPERTS, INTER), np.float32), exact=True),
            ),
        ],
        "MoeLayer.packed_bytes": [Case(lambda: layer.packed_bytes)],
        "MoeLayer.stats": [Case(layer.stats)],
        "MoeLayer.set_timing": [Case(layer.set_timing, on=Flag(False))],
        "MoeLayer.timings": [Case(layer.timings)],
        "ProductBench.set_rows": [
            Case(
                lambda x: bench.set_rows(x),
                x=Array(t.w, free=(0,)),
                extra=[(dict(x=t.w[:0]), ValueError)],
            ),
        ],
        "ProductBench.run": [
            Case(bench.run, tiles=Number(1, 1, (1 << 31) - 1)),
        ],
        "ProductBench.tile_bytes": [Case(lambda: bench.tile_bytes)],
        "ProductBench.bytes": [Case(lambda: bench.bytes)],
    }
