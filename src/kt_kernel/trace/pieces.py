"""The time slices of a record, and the lanes in which they are shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .records import Record, StreamedRecord

GPU, TRANSFERS, CPU, BUS = "GPU", "transfers", "CPU pool", "bus"

BETWEEN, HOT, WAIT = "between layers", "hot experts", "wait for the CPU"
HAND_OVER, TAKE_BACK = "hand over", "take back"
EXPERTS, DEFERRED = "experts", "deferred experts"

LANES = {GPU: (BETWEEN, HOT, WAIT), TRANSFERS: (HAND_OVER, TAKE_BACK), CPU: (EXPERTS, DEFERRED)}
# Of streamed layers. The layer lies around the GPU's other slices.
LAYER, BUS_WAIT, PRODUCTS = "streamed layer", "wait for the bus", "streamed experts"
COPIES = "copies"
STREAMED_LANE_OF = {LAYER: GPU, BUS_WAIT: GPU, PRODUCTS: GPU, COPIES: BUS}

LANE_OF = {piece: lane for lane, pieces in LANES.items() for piece in pieces}


class Piece(NamedTuple):
    """start, end: nanoseconds, of the GPU's clock unless the lane is the CPU's."""

    name: str
    start: int
    end: int


def pieces_of(record: Record, before: Record | None) -> Iterator[Piece]:
    """Those whose times are known and not negative. before: the record before, for `BETWEEN`.

    WAIT is last: a file in which it is there has the whole record.
    """
    found = [
        Piece(EXPERTS, record.begun, record.ended),
        Piece(DEFERRED, record.late_begun, record.late_ended),
        Piece(HAND_OVER, record.hand_start, record.hand_end),
        Piece(TAKE_BACK, record.back_ready, record.back_end),
        Piece(HOT, record.hand_end, record.back_start),
        Piece(WAIT, record.back_start, record.back_ready),
    ]
    if before is not None and _follows(record, before):
        found.insert(0, Piece(BETWEEN, before.back_end, record.hand_start))
    return (piece for piece in found if piece.start and piece.end >= piece.start)


def streamed_pieces(record: StreamedRecord) -> Iterator[tuple[Piece, int, int]]:
    """(piece, experts, bytes) of a streamed layer, in the CPU's clock. `LAYER` is last: a file in
    which it is there has the whole layer."""
    for group in record.groups:
        about = group.experts, group.nbytes
        yield Piece(COPIES, group.copy_start, group.copy_end), *about
        yield Piece(BUS_WAIT, group.wait_start, group.wait_end), *about
        yield Piece(PRODUCTS, group.wait_end, group.done), *about
    nbytes = sum(group.nbytes for group in record.groups)
    yield Piece(LAYER, record.start, record.end), record.experts, nbytes


def _follows(record: Record, before: Record) -> bool:
    """Whether it is of the next layer in the same pass; where records were lost between the two,
    the numbers tell."""
    return (
        record.chain == before.chain
        and record.position == before.position + 1
        and record.number == (before.number + 1) % 2**32
    )
