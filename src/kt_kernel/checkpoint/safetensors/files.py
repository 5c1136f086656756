"""Reads tensors of safetensors files."""

from __future__ import annotations

import torch

from ..header import TensorInfo
from ..open_files import OpenFiles

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_PAIRS = "F4"  # two codes in a byte: read as bytes, half as many columns


class Files(OpenFiles):
    """The safetensors files of a checkpoint."""

    def read(self, info: TensorInfo, first: int | None = None) -> torch.Tensor:
        """A tensor or, if an index is given, that entry along its first dimension, in memory of its
        own. F4 is read as uint8, two columns in a byte.

        Raises ValueError naming file and tensor for a type that PyTorch does not have, and what
        `read_part` raises.
        """
        dtype, shape = _DTYPES.get(info.dtype), info.shape
        if info.dtype == _PAIRS and shape and shape[-1] % 2 == 0:
            dtype, shape = torch.uint8, (*shape[:-1], shape[-1] // 2)
        if dtype is None:
            accepted = ", ".join((*_DTYPES, _PAIRS))
            raise ValueError(f"{info} has dtype {info.dtype}; accepted: {accepted}")
        if first is None:
            return self.read_part(info).view(dtype).view(shape)
        return self.read_part(info, first, shape[0]).view(dtype).view(shape[1:])
