"""What is timed on a GPU, run on the CPU: shapes, and how rates follow from times."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_time_model import SHAPE

from kt_kernel.runtime.gpu import GpuMemory
from kt_kernel.tuning import gpu


def test_rates_follow_from_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every timed call runs once, and takes a millisecond."""
    calls = []

    def best(call: Callable[[], object]) -> float:
        calls.append(call())
        return 1e-3

    empty = torch.empty
    monkeypatch.setattr(gpu, "_best", best)
    monkeypatch.setattr(gpu, "_captured", lambda call: call)
    monkeypatch.setattr(gpu, "gpu_memory", lambda device: GpuMemory(70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory=False, **given: empty(*size, **given)
    )
    monkeypatch.setattr(gpu, "_PRODUCT", (64, 32, 128))
    found = gpu.measure_gpu(SHAPE, torch.device("cpu"))
    assert (found.name, found.total) == ("GPU", 80 << 30)
    assert [tokens for tokens, _ in found.rest] == [1, 4, 16, 64]
    assert {seconds for _, seconds in found.rest} == {1e-3 / 8}
    assert found.bandwidth == 2 * (1 << 29) / 1e-3 and found.bus == (1 << 28) / 1e-3
    assert found.flops == 2 * 64 * 32 * 128 / 1e-3
    assert found.kernel == 1e-3 / 200
    assert [tokens for tokens, _ in found.head] == [1, 4, 16, 64]
    assert {seconds for _, seconds in found.head} == {1e-3}
    assert len(calls) == 12


def test_a_full_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu, "_measured", full)
    monkeypatch.setattr(gpu, "gpu_memory", lambda device: GpuMemory(1 << 30, 20 << 30))
    with pytest.raises(ValueError, match="the GPU has 1GB of 20GB free, too little"):
        gpu.measure_gpu(SHAPE, torch.device("cuda", 0))
