"""Fixtures of the live expert cache."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from cached_model import CPU
from restless import VARIABLE

from kt_kernel.device.cache import CudaCache
from kt_kernel.device.uploads import CudaUploads
from kt_kernel.serving import cache_start


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


class _Stream:
    def __init__(self, device: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Event:
    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes for a GPU, with Triton's interpreter and streams that compute at once."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(cache_start, "HostCache", CudaCache)
    monkeypatch.setattr(cache_start, "_uploads", lambda device, _, packed: CudaUploads(CPU, packed))
