"""How much memory a GPU has. torch is imported when a function is called: the plugins import this
module before they know whether the package is whole."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PATIENCE = 120  # seconds for a process that imports torch on a busy machine
_PROGRAM = "import sys, torch; print(*torch.cuda.mem_get_info(int(sys.argv[1])))"


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of a GPU's memory: all of it, and what no process holds. On a part of a GPU (MIG), both
    are of the part."""

    free: int
    total: int


def gpu_memory(device: torch.device | int = 0) -> GpuMemory:
    """Of a GPU, as this process sees it. What the process's own CUDA context takes is not free.

    Raises:
        RuntimeError: CUDA cannot use the GPU.
    """
    import torch

    return GpuMemory(*torch.cuda.mem_get_info(device))


def gpu_memory_from_outside(device: int = 0) -> GpuMemory | None:
    """Of a GPU, without CUDA in this process: another one looks, and ends. None if there is no such
    GPU, or the other process fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(device)],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=True,
        )
        free, total = map(int, done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return GpuMemory(free, total)
