"""Packs experts in batches, and records the time and bytes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..runtime.text import shown_size

#: The matrices and biases of one expert by their names.
Expert = dict[str, Any]

#: Source bytes packed at a time: enough that the threads rarely synchronise.
BATCH_BYTES = 16 << 20


def bytes_of(expert: Expert) -> int:
    """Bytes of an expert's matrices and biases, without those that are None."""
    return sum(part.nbytes for part in expert.values() if part is not None)


def batches(experts: Iterable[tuple[int, Expert]]) -> Iterator[list[tuple[int, Expert]]]:
    """(slot, expert) in lists of about `BATCH_BYTES`, or one larger expert. Keeps no reference to
    experts already yielded."""
    batch: list[tuple[int, Expert]] = []
    size = 0
    for slot, expert in experts:
        batch.append((slot, expert))
        size += bytes_of(expert)
        del expert
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@dataclass
class LoadRecord:
    """source_bytes: bytes of the weights in files or as an engine delivered them. seconds: time of
    reading and packing; only of packing if an engine delivers the weights."""

    source_bytes: int = 0
    packed_bytes: int = 0
    seconds: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Adds the time of the block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin

    def __add__(self, other: LoadRecord) -> LoadRecord:
        return LoadRecord(
            self.source_bytes + other.source_bytes,
            self.packed_bytes + other.packed_bytes,
            self.seconds + other.seconds,
        )

    def describe(self, part: str = "") -> str:
        """Sizes, seconds and rate. `part` describes what the seconds cover."""
        rate = f" ({shown_size(self.source_bytes / self.seconds)}/s)" if self.seconds else ""
        return (
            f"{shown_size(self.packed_bytes)} packed from {shown_size(self.source_bytes)} in "
            f"{self.seconds:.3g} s{part}{rate}"
        )
