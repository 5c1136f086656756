"""CUDA for the hand-over: pinned memory, compiled kernels, state of graph captures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.streams import handle_of
from ..runtime.text import shown_size
from ..runtime.variant import native

_PORTABLE_AND_MAPPED = 0x1 | 0x2  # flags of cudaHostRegister
# Addresses that Triton's kernels take after their own arguments; ours need no memory.
NO_SCRATCH = 0, 0
_KINDS = {"i32": "i", "i64": "l"}  # letters of the compiled core


def kernel_launch(kernel: Any, types: Sequence[str]) -> Any:
    """A KernelLaunch of a kernel that Triton has compiled and loaded, in the current context.

    types: of its parameters by Triton's names, without constants; the addresses of `NO_SCRATCH`
    follow them.
    """
    kinds = "".join("p" if type_.startswith("*") else _KINDS[type_] for type_ in types)
    threads = 32 * kernel.metadata.num_warps
    return native().KernelLaunch(
        kernel.function, threads, kernel.metadata.shared, kinds + "p" * len(NO_SCRATCH)
    )


def cuda_context(device: torch.device) -> Any:
    """The compiled core's CudaContext of a device."""
    with torch.cuda.device(device):
        torch.cuda.is_current_stream_capturing()  # makes a context current in this thread
        return native().CudaContext()


class CudaBackend:
    """One CUDA device. Raises RuntimeError naming CUDA's error if a call fails."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._context: Any = None  # the compiled core's CudaContext, made at its first use

    def pin(self, buffer: Any) -> None:
        """Gives the device access to host memory, at its host addresses.

        buffer: has ``address`` and ``nbytes``, such as a HostBuffer or a PackedPart.
        """
        with torch.cuda.device(self.device):
            status = torch.cuda.cudart().cudaHostRegister(
                buffer.address, buffer.nbytes, _PORTABLE_AND_MAPPED
            )
        if status != 0:
            raise RuntimeError(
                f"{self.device}: {shown_size(buffer.nbytes)} of host memory cannot be pinned: "
                f"{torch.cuda.cudart().cudaGetErrorString(status)} (see ulimit -l, and the memory "
                "limit of the container)"
            )

    def unpin(self, buffer: Any) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(buffer.address)

    def compile(
        self, function: Any, arguments: Sequence[torch.dtype | int], warps: int, **constants: Any
    ) -> Any:
        """A KernelLaunch of a Triton kernel: its parameters are addresses and int32s, and those of
        `NO_SCRATCH`.

        arguments: for each non-constant parameter, the dtype that it points to, or 0 for an int32.
        Every address must be a multiple of 16, except for parameters that the kernel exempts.
        """
        with torch.cuda.device(self.device):
            kernel = function.warmup(
                *(argument or 1 for argument in arguments), grid=(1,), num_warps=warps, **constants
            )
            kernel._init_handles()  # loads the kernel, impossible while a graph is captured
            return kernel_launch(kernel, ["*" if argument else "i32" for argument in arguments])

    def capturing(self, stream: int | None = None) -> bool:
        """Whether a graph is captured on a stream (a handle; None: the current stream)."""
        return self._own_context().capturing(
            handle_of(self.device, None) if stream is None else stream
        )

    def wait(self, address: int, value: int) -> None:
        """Makes the current stream wait until the 32-bit word at an address in pinned memory is
        ``value``."""
        self._own_context().wait(handle_of(self.device, None), address, value)

    def _own_context(self) -> Any:
        if self._context is None:
            self._context = cuda_context(self.device)
        return self._context

    def idle(self) -> bool:
        """Whether the device has finished the current and the default stream."""
        streams = torch.cuda.current_stream(self.device), torch.cuda.default_stream(self.device)
        return all(stream.query() for stream in streams)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
