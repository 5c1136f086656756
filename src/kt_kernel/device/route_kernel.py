"""The Triton kernel that counts the experts of a batch, for `kt_kernel.serving.recording`.

One launch without host synchronisation, so it can be captured in a CUDA graph. Totals are kept in
device memory and mirrored to pinned host memory, where the host reads them at any time.
"""

import triton
import triton.language as tl

from .kernels import _system_fence

_ROUTES = 1024  # that the program looks at in one step
_FEWEST_BINS = 128


def constants(experts: int, top_k: int) -> dict[str, int]:
    """The constants of `count_routes` that follow from a layer's shape."""
    columns = triton.next_power_of_2(top_k)
    return {
        "TOP_K": top_k,
        "EXPERTS": experts,
        "COLUMNS": columns,
        "ROWS": max(1, _ROUTES // columns),
        "BINS": max(_FEWEST_BINS, triton.next_power_of_2(experts + 1)),
    }


@triton.jit
def without_padding(inside, padding, row, PADDED: tl.constexpr):
    """``inside`` without rows that are padding: with PADDED, an int64 below 0, a byte other than
    0."""
    if PADDED:
        pads = tl.load(padding + row, mask=inside, other=0)
        if padding.dtype.element_ty == tl.int64:
            inside = inside & (pads >= 0)
        else:
            inside = inside & (pads == 0)
    return inside


@triton.jit(
    do_not_specialize=["tokens", "capacity"],
    do_not_specialize_on_alignment=["ids", "padding", "totals", "host_totals", "routes", "passes"],
)
def count_routes(
    ids,
    padding,
    totals,
    host_totals,
    routes,
    passes,
    tokens,
    capacity,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BINS: tl.constexpr,
    PADDED: tl.constexpr,
    FENCE: tl.constexpr,
):
    """Adds a batch to the totals of its layer; one program.

    ids [tokens, TOP_K] on the device, contiguous, any integer type. With PADDED, rows are no tokens
    where padding [tokens] says so: an int64 below 0, a byte other than 0. Rows without any expert
    from 0 to EXPERTS - 1 are no tokens, either.
    totals: int64 [EXPERTS + 2] on the device: of each expert, of tokens, of passes. host_totals:
    the same in pinned memory, written at the end. routes: int16 [capacity, TOP_K], passes: int32
    [capacity], both pinned: the experts and the pass of each token, until they are full.
    """
    number = tl.load(totals + EXPERTS)
    this_pass = tl.load(totals + EXPERTS + 1)
    added = tl.zeros([BINS], dtype=tl.int32)
    column = tl.arange(0, COLUMNS)[None, :]
    for first in range(0, tokens, ROWS):
        row = first + tl.arange(0, ROWS)
        real = without_padding(row < tokens, padding, row, PADDED)
        at = tl.cast(row, tl.int64)[:, None] * TOP_K + column
        inside = real[:, None] & (column < TOP_K)
        # int64 first, since an unsigned type cannot hold -1.
        given = tl.cast(tl.load(ids + at, mask=inside, other=0), tl.int64)
        known = inside & (given >= 0) & (given < EXPERTS)
        expert = tl.where(known, given, EXPERTS).to(tl.int32)
        added += tl.histogram(tl.reshape(expert, [ROWS * COLUMNS]), BINS)
        is_token = tl.max(known.to(tl.int32), axis=1)
        place = number + tl.cumsum(is_token, axis=0) - is_token
        kept = (is_token > 0) & (place < capacity)
        tl.store(
            routes + place[:, None] * TOP_K + column,
            tl.where(known, given, -1).to(tl.int16),
            mask=kept[:, None] & (column < TOP_K),
        )
        tl.store(passes + place, this_pass.to(tl.int32) + tl.zeros([ROWS], tl.int32), mask=kept)
        number += tl.sum(is_token, axis=0)
    bins = tl.arange(0, BINS)
    total = tl.load(totals + bins, mask=bins < EXPERTS, other=0) + added
    total = tl.where(bins < EXPERTS, total, number)  # the token count follows the experts
    tl.debug_barrier()
    tl.store(totals + bins, total, mask=bins <= EXPERTS)
    tl.store(totals + EXPERTS + 1, this_pass + 1)
    # What the host may read of routes and passes is there before the number of tokens.
    last = _system_fence(tl.cast(EXPERTS, tl.int32), FENCE)
    tl.debug_barrier()
    tl.store(host_totals + bins, total, mask=bins <= last)
