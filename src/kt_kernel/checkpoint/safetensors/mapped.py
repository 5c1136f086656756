"""Reads tensors of a safetensors file that the safetensors library refuses to open."""

from __future__ import annotations

import mmap

import torch

from ..header import DTYPE_BITS, read_header

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
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
}


def has_unknown_types(path: str) -> bool:
    """Whether a tensor of the file has a type that is not in safetensors' specification."""
    return any(info.dtype not in DTYPE_BITS for info in read_header(path).values())


class MappedFile:
    """A file that passed `read_header`, with the methods that the library's files have."""

    def __init__(self, path: str, descriptor: int) -> None:
        self._tensors = read_header(path)
        self._memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        self._data = 8 + int.from_bytes(self._memory[:8], "little")

    def get_tensor(self, name: str) -> torch.Tensor:
        """A view of the mapping, which lives as long as its tensors. Raises ValueError naming file
        and tensor for a type that PyTorch does not have."""
        info = self._tensors[name]
        dtype = _DTYPES.get(info.dtype)
        if dtype is None:
            raise ValueError(
                f"{info} has dtype {info.dtype}; accepted in this file: {', '.join(_DTYPES)}"
            )
        size, begin = info.end - info.begin, self._data + info.begin
        if not size:
            return torch.empty(info.shape, dtype=dtype, device="cpu")
        data = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=begin)
        aligned = data.clone() if data.data_ptr() % dtype.itemsize else data
        return aligned.view(dtype).view(info.shape)

    def get_slice(self, name: str) -> torch.Tensor:
        """A tensor to index along its first dimension."""
        return self.get_tensor(name)
