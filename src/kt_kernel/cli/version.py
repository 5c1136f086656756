"""``kt version``: versions for bug reports."""

from __future__ import annotations

import platform
from importlib import metadata


def version() -> None:
    """Print the versions of everything that a bug report needs."""
    rows = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cuda": _cuda(),
        "kt-moe": _kt_moe(),
        "sglang": _installed("sglang"),
        "vllm": _installed("vllm"),
    }
    for name, value in rows.items():
        print(f"{name:<9}{value}")


def _installed(*names: str) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _kt_moe() -> str:
    import kt_kernel

    return f"{kt_kernel.__version__} ({kt_kernel.__cpu_kernel__} kernels)"


def _cuda() -> str:
    import torch

    if torch.version.cuda is None:
        return "none (PyTorch's CPU build)"
    if not torch.cuda.is_available():
        return f"{torch.version.cuda}, no usable device"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{torch.version.cuda}, {', '.join(names)}"
