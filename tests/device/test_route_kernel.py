"""The kernel that counts routes, in Triton's interpreter, against counting one by one."""

from __future__ import annotations

import pytest
import torch
from grid import grid

pytest.importorskip("triton")

from kt_kernel.serving.recording import launch

UNTOUCHED = -7


@grid(
    shape=[(128, 8), (6, 2), (512, 10), (130, 1)],
    ids_dtype=[torch.int32, torch.int64],
    padding_dtype=[None, torch.bool, torch.int64],
)
def test_counts_tokens_and_routes(
    shape: tuple[int, int], ids_dtype: torch.dtype, padding_dtype: torch.dtype | None
) -> None:
    """Three passes, of one token, of more rows than the kernel takes at once, and of some that do
    not fit any more."""
    experts, k = shape
    generator = torch.Generator().manual_seed(experts)
    totals = torch.zeros(experts + 2, dtype=torch.int64)
    rows = (1, 1100 // k, 5)
    capacity = sum(rows) // 2 + 1
    host = (
        torch.zeros_like(totals),
        torch.full((capacity, k), UNTOUCHED, dtype=torch.int16),
        torch.full((capacity,), UNTOUCHED, dtype=torch.int32),
    )
    counts, tokens = [0] * experts, []
    for number, count in enumerate(rows):
        ids = torch.randint(-1, experts + 1, (count, k), generator=generator).to(ids_dtype)
        padding = None
        no_token = [False] * count
        if padding_dtype is not None:
            mask = torch.rand(count, generator=generator) < 0.4
            no_token = mask.tolist()
            padding = mask if padding_dtype == torch.bool else torch.where(mask, -1, 12)
        launch(ids, padding, totals, host, capacity, fence=False)
        for row, skipped in zip(ids.tolist(), no_token, strict=True):
            known = [e if 0 <= e < experts else -1 for e in row]
            if skipped or max(known) < 0:
                continue
            tokens.append((number, known))
            for expert in known:
                if expert >= 0:
                    counts[expert] += 1
    assert totals.tolist() == [*counts, len(tokens), 3]
    assert host[0].tolist()[:-1] == totals.tolist()[:-1]
    kept = tokens[:capacity]
    rest = capacity - len(kept)
    assert host[1].tolist() == [row for _, row in kept] + [[UNTOUCHED] * k] * rest
    assert host[2].tolist() == [number for number, _ in kept] + [UNTOUCHED] * rest
