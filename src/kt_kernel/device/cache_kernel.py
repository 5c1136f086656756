"""The Triton kernel that runs before each use of a layer whose experts move, see `cache`.

One launch without host synchronisation, so it can be captured in a CUDA graph.
"""

import triton
import triton.language as tl

from .route_kernel import without_padding

_ROUTES = 1024  # that the program looks at in one step


def constants(experts: int, top_k: int) -> dict[str, int]:
    """The constants of `begin_pass` that follow from a layer's shape."""
    columns = triton.next_power_of_2(top_k)
    return {
        "TOP_K": top_k,
        "EXPERTS": experts,
        "BINS": triton.next_power_of_2(experts),
        "COLUMNS": columns,
        "ROWS": max(1, _ROUTES // columns),
    }


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=[
        "ids",
        "padding",
        "live",
        "wanted",
        "version",
        "totals",
        "passed",
    ],
)
def begin_pass(
    ids,
    padding,
    live,
    wanted,
    version,
    totals,
    passed,
    tokens,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Takes a new map of slots into use, and counts the routes of a batch; one program.

    live: int32 [EXPERTS], the map that the batch's later kernels read. wanted, version: the map
    that the host published, and its number, int32, written after the map. totals: int64
    [EXPERTS + 4]: the uses of each expert; tokens, routes, routes to experts with a slot, and the
    number of `live`. passed: int64 in pinned memory, receives the tokens.

    ids [tokens, TOP_K], contiguous, any integer type; with PADDED, rows are no tokens where padding
    [tokens] says so: an int64 below 0, a byte other than 0.
    """
    numbers = totals + EXPERTS
    published = tl.atomic_add(version, 0, sem="acquire", scope="sys")
    if published != tl.load(numbers + 3).to(tl.int32):
        bins = tl.arange(0, BINS)
        tl.debug_barrier()
        slots = tl.load(wanted + bins, mask=bins < EXPERTS, volatile=True)
        tl.store(live + bins, slots, mask=bins < EXPERTS)
        # Everything that read the old map is done, because it is earlier on this stream.
        tl.store(numbers + 3, published.to(tl.int64))
    tl.debug_barrier()
    routes = tl.zeros([ROWS * COLUMNS], tl.int32)
    hits = tl.zeros([ROWS * COLUMNS], tl.int32)
    column = tl.arange(0, ROWS * COLUMNS) % COLUMNS
    for first in range(0, tokens, ROWS):
        row = first + tl.arange(0, ROWS * COLUMNS) // COLUMNS
        inside = (row < tokens) & (column < TOP_K)
        # int64 first, since an unsigned type cannot hold -1.
        given = tl.load(ids + tl.cast(row, tl.int64) * TOP_K + column, mask=inside, other=0)
        given = tl.cast(given, tl.int64)
        known = without_padding(inside, padding, row, PADDED) & (given >= 0) & (given < EXPERTS)
        expert = tl.where(known, given, 0)
        slot = tl.load(live + expert, mask=known, other=-1)
        one = tl.full([ROWS * COLUMNS], 1, tl.int64)
        tl.atomic_add(totals + expert, one, mask=known, sem="relaxed")
        routes += known.to(tl.int32)
        hits += (slot >= 0).to(tl.int32)
    number = tl.load(numbers) + tokens
    tl.store(numbers, number)
    tl.store(passed, number)
    tl.store(numbers + 1, tl.load(numbers + 1) + tl.sum(routes, axis=0))
    tl.store(numbers + 2, tl.load(numbers + 2) + tl.sum(hits, axis=0))
