"""CUDA for the hand-over: pinned memory, compiled kernels, state of graph captures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..runtime.streams import handle_of
from ..runtime.variant import native

_PORTABLE_AND_MAPPED = 0x1 | 0x2  # flags of cudaHostRegister
_SCRATCH = 2  # pointers that Triton's kernels take after their own arguments; ours need no memory


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
                f"{self.device}: {buffer.nbytes / 1e6:.1f} MB of host memory cannot be pinned: "
                f"{torch.cuda.cudart().cudaGetErrorString(status)} (see ulimit -l, and the memory "
                "limit of the container)"
            )

    def unpin(self, buffer: Any) -> None:
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(buffer.address)

    def compile(
        self, function: Any, arguments: Sequence[torch.dtype | int], warps: int, **constants: Any
    ) -> Any:
        """A KernelLaunch of a Triton kernel: its parameters are addresses and int32s, and _SCRATCH
        addresses of 0.

        arguments: for each non-constant parameter, the dtype that it points to, or 0 for an int32.
        Every address must be a multiple of 16, except for parameters that the kernel exempts.
        """
        with torch.cuda.device(self.device):
            kernel = function.warmup(
                *(argument or 1 for argument in arguments), grid=(1,), num_warps=warps, **constants
            )
            kernel._init_handles()  # loads the kernel, impossible while a graph is captured
            kinds = "".join("p" if argument else "i" for argument in arguments) + "p" * _SCRATCH
            return native().KernelLaunch(  # launches in the context that is current here
                kernel.function, 32 * kernel.metadata.num_warps, kernel.metadata.shared, kinds
            )

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
            with torch.cuda.device(self.device):
                torch.cuda.is_current_stream_capturing()  # makes a context current in this thread
                self._context = native().CudaContext()
        return self._context

    def idle(self) -> bool:
        """Whether the device has finished the current and the default stream."""
        streams = torch.cuda.current_stream(self.device), torch.cuda.default_stream(self.device)
        return all(stream.query() for stream in streams)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)
