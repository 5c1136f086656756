"""What the stand-in of the CUDA driver (stream/fake_cuda.c) keeps of its calls."""

from __future__ import annotations

import ctypes

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
