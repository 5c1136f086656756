"""What the stand-in of the CUDA driver (stream/fake_cuda.c) keeps of its calls."""

from __future__ import annotations

import ctypes
from typing import Any

UINT3 = ctypes.c_uint * 3


class Last(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("grid", UINT3),
        ("block", UINT3),
        ("shared", ctypes.c_uint),
        ("has_extra", ctypes.c_int),
        ("values", ctypes.c_uint64 * 32),
    ]


def state(fake: str, kinds: str) -> tuple[Last, Any]:
    """Where the library keeps the last launch, and what its calls answer: 0. kinds: of the
    parameters that launches have from now on."""
    library = ctypes.CDLL(fake)
    sizes = (ctypes.c_int * 32).in_dll(library, "sizes")
    for i in range(32):
        sizes[i] = {"i": 4}.get(kinds[i], 8) if i < len(kinds) else 0
    result = ctypes.c_int.in_dll(library, "result")
    result.value = 0
    return Last.in_dll(library, "last"), result
