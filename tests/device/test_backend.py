"""What the CUDA backend asks of torch and the driver, both played here."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from kt_kernel.device import backend
from kt_kernel.runtime import streams

CUDA = torch.device("cuda", 1)


@pytest.mark.parametrize("raw", [True, False])
def test_the_current_stream_of_the_device(raw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's quick way where there is one."""
    monkeypatch.setattr(streams, "_current_handle", {1: 77}.get if raw else None)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=70 + device.index)
    )
    assert streams.handle_of(CUDA, None) == (77 if raw else 71)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list:
    """Gets the device that becomes the current one, and "left" when it no longer is."""
    found: list = []

    @contextlib.contextmanager
    def device(wanted: torch.device):
        found.append(wanted)
        try:
            yield
        finally:
            found.append("left")

    monkeypatch.setattr(torch.cuda, "device", device)
    return found


def test_a_kernel_is_launched_in_the_devices_context(
    steps: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another device is the current one of the thread that submits."""
    kernel = SimpleNamespace(
        function=9,
        metadata=SimpleNamespace(num_warps=8, shared=64),
        _init_handles=lambda: steps.append("loaded"),
    )
    launches = SimpleNamespace(KernelLaunch=lambda *given: steps.append(given))
    monkeypatch.setattr(backend, "native", lambda: launches)
    function = SimpleNamespace(warmup=lambda *given, **constants: kernel)
    backend.CudaBackend(CUDA).compile(function, (torch.int32, 0), 8)
    assert steps == [CUDA, "loaded", (9, 256, 64, "pipp"), "left"]


def test_the_driver_is_asked_in_the_devices_context(
    steps: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CudaContext:
        def __init__(self) -> None:
            steps.append("context")

        def capturing(self, stream: int) -> bool:
            return stream == 5

    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: steps.append("initialised")
    )
    monkeypatch.setattr(backend, "native", lambda: SimpleNamespace(CudaContext=CudaContext))
    monkeypatch.setattr(streams, "_current_handle", {1: 5}.get)
    made = backend.CudaBackend(CUDA)
    assert [made.capturing(stream) for stream in (0, 5, None)] == [False, True, True]
    assert steps == [CUDA, "initialised", "context", "left"]  # once
