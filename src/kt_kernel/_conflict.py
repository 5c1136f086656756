"""Notices the distribution kt-kernel, which installs the same import package over ours."""

from __future__ import annotations

import warnings
from importlib import metadata
from pathlib import Path

_MARKER = "_kt_moe_marker"  # a file no other distribution has
_REPAIR = "pip uninstall kt-kernel && pip install --force-reinstall --no-deps kt-moe"


def overwritten() -> str | None:
    """A line saying so when files of this package were removed or replaced, else None."""
    folder = Path(__file__).parent
    try:
        ours = "_conflict.check()" in (folder / "__init__.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        ours = False
    if ours and (folder / _MARKER).exists():
        return None
    return (
        f"the files of kt-moe in {folder} were replaced or removed by another distribution "
        f"(kt-kernel uses the same import name, kt_kernel); to repair: {_REPAIR}"
    )


def both_installed() -> str | None:
    """A line saying so when kt-kernel is installed next to kt-moe, else None."""
    try:
        version = metadata.version("kt-kernel")
    except metadata.PackageNotFoundError:
        return None
    return (
        f"kt-kernel {version} is installed next to kt-moe and writes to the same import package, "
        f"kt_kernel; uninstall kt-kernel: {_REPAIR}"
    )


def check() -> None:
    """Called at import and by every entry point.

    Raises:
        ImportError: files of this package are gone or replaced.

    Warns:
        RuntimeWarning: kt-kernel is installed too.
    """
    if (problem := overwritten()) is not None:
        raise ImportError(problem)
    if (problem := both_installed()) is not None:
        warnings.warn(problem, RuntimeWarning, stacklevel=3)
