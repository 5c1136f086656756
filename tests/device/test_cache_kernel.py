"""The kernel before each use of a layer whose experts move, in Triton's interpreter, against its
counterpart for an engine on the CPU; and that counterpart against counting one by one."""

from __future__ import annotations

import pytest
import torch
from grid import grid

pytest.importorskip("triton")

from kt_kernel.device.cache import HostCache, Totals, launch


@grid(
    shape=[(256, 8), (6, 2), (130, 1)],
    ids_dtype=[torch.int32, torch.int64, torch.uint8],
    padding_dtype=[None, torch.bool, torch.int64],
)
def test_maps_and_counts(
    shape: tuple[int, int], ids_dtype: torch.dtype, padding_dtype: torch.dtype | None
) -> None:
    experts, k = shape
    g = torch.Generator().manual_seed(experts)
    host = HostCache(torch.device("cpu"), 2, experts)
    live = torch.full((experts,), -1, dtype=torch.int32)
    wanted, version = live.clone(), torch.zeros(1, dtype=torch.int32)
    totals, passed = torch.zeros(experts + 4, dtype=torch.int64), torch.zeros(1).long()
    uses, tokens, hits = [0] * experts, 0, 0
    for number, count in enumerate((1, 1100 // k, 5, 3)):
        if number != 2:  # the map stays in one pass
            wanted = torch.randint(-1, 4, (experts,), generator=g, dtype=torch.int32)
            version += 1
        host.wanted[1], host.versions[1] = wanted.numpy(), int(version)
        low = -1 if ids_dtype.is_signed else 0
        high = min(experts + 1, torch.iinfo(ids_dtype).max)
        ids = torch.randint(low, high, (count, k), generator=g).to(ids_dtype)
        padding, skipped = None, [False] * count
        if padding_dtype is not None:
            mask = torch.rand(count, generator=g) < 0.4
            skipped = mask.tolist()
            padding = mask if padding_dtype == torch.bool else torch.where(mask, -1, 12)
        launch(ids, padding, live, wanted, version, totals, passed)
        host.publish()
        host.begin_pass(1, ids, padding)
        for row, skip in zip(ids.tolist(), skipped, strict=True):
            tokens += 1
            for expert in row:
                if not skip and 0 <= expert < experts:
                    uses[expert] += 1
                    hits += int(wanted[expert]) >= 0
        assert torch.equal(live, wanted) and torch.equal(host.live[1], wanted)
        numbers = [tokens, sum(uses), hits, int(version)]
        assert totals.tolist() == [*uses, *numbers]
        counted = host.totals()
        assert counted.uses[1].tolist() == uses
        assert passed.tolist() == [tokens] and host.passed.tolist() == [0, tokens]
        assert counted.hits[1] == hits and counted.versions.tolist() == [0, int(version)]
    host.clear()
    assert not host.totals().uses.any() and host.totals().versions[1] == int(version)
    assert Totals(totals.numpy()[None]).tokens[0] == tokens
