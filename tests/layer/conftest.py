"""Fixtures of the live expert cache."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import pytest
import torch
from cached_model import CPU
from kernels.compiling import build_fake_driver
from restless import VARIABLE

from kt_kernel import _C
from kt_kernel.device import cache, uploads
from kt_kernel.device.cache import CudaCache
from kt_kernel.device.uploads import CudaUploads
from kt_kernel.serving import cache_start


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


class _Stream:
    cuda_stream = 1

    def __init__(self, device: Any = None) -> None:
        pass


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A stand-in for CUDA's driver that copies at once."""
    library = build_fake_driver(tmp_path_factory.mktemp("cuda"))
    ctypes.c_int.in_dll(ctypes.CDLL(library), "copying").value = 1
    return library


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch, driver: str) -> None:
    """The classes for a GPU, with Triton's interpreter and streams that compute at once."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    for module in (cache, uploads):
        monkeypatch.setattr(module, "cuda_context", lambda device: _C.CudaContext(driver))
    monkeypatch.setattr(cache_start, "HostCache", CudaCache)
    monkeypatch.setattr(cache_start, "_uploads", lambda device, _, packed: CudaUploads(CPU, packed))
