"""Installation faults: files overwritten by another distribution, and errors that engines swallow.

The distribution kt-kernel installs the same import package over ours, including
``kt_kernel/__init__.py``. The plugins, which it does not have, therefore call `check` as well.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

_MARKER = "_kt_moe_marker"  # a file that no other distribution has
_LOADERS = ("vllm.plugins", "sglang.srt.plugins")  # the engines' modules that import plugins


def overwritten() -> str | None:
    """An error line if files of this package were removed or replaced, else None."""
    folder = Path(__file__).parent
    try:
        ours = "_conflict.check()" in (folder / "__init__.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        ours = False
    if ours and (folder / _MARKER).exists():
        return None
    return (
        f"the files of kt-moe in {folder} were replaced or removed by another distribution "
        f"(kt-kernel uses the same import name, kt_kernel); to repair: {_repair()}"
    )


def both_installed() -> str | None:
    """A warning line if kt-kernel is installed next to kt-moe, else None."""
    try:
        version = metadata.version("kt-kernel")
    except metadata.PackageNotFoundError:
        return None
    return (
        f"kt-kernel {version} is installed next to kt-moe and writes to the same import package, "
        f"kt_kernel; uninstall kt-kernel: {_repair()}"
    )


def _repair() -> str:
    """The commands that remove kt-kernel and restore our files, which its removal deletes."""
    path = _installed_from()
    again = "pip install --force-reinstall --no-deps"
    if path is None:
        return (
            "pip uninstall kt-kernel, then install kt-moe again from the checkout or wheel that it "
            f"came from: {again} PATH"
        )
    return f"pip uninstall kt-kernel && {again} {shlex.quote(path)}"


def _installed_from() -> str | None:
    """The checkout or wheel on this machine that kt-moe was installed from, if it is still there
    (direct_url.json of the Direct URL specification of the Python Packaging User Guide)."""
    try:
        text = metadata.distribution("kt-moe").read_text("direct_url.json")
        url = urlsplit(str(json.loads(text or "{}")["url"]))
    except (metadata.PackageNotFoundError, OSError, ValueError, KeyError, TypeError):
        return None
    path = unquote(url.path)
    return path if url.scheme == "file" and os.path.exists(path) else None


def check() -> None:
    """Called at import and by every entry point.

    Raises:
        ImportError: files of this package are gone or replaced.

    Warns:
        RuntimeWarning: kt-kernel is installed, too.
    """
    if (problem := overwritten()) is not None:
        raise ImportError(problem)
    if (problem := both_installed()) is not None:
        warnings.warn(problem, RuntimeWarning, stacklevel=3)


def options_visible() -> bool:
    """Whether kt options are visible before an engine has read its arguments.

    That is, in KT_CONFIG or as a flag, spelled with hyphens or, as vLLM allows, underscores.
    Options in a configuration file or in an engine's Python arguments are not visible here.
    """
    return bool(os.environ.get("KT_CONFIG")) or any(
        argument.replace("_", "-").startswith(("--kt-", "--record-kt-"))
        for argument in getattr(sys, "argv", ())
    )


def in_engine() -> bool:
    """Whether an engine that loads plugins is in this process."""
    return any(name in sys.modules for name in _LOADERS)


@contextmanager
def told_to_engines() -> Iterator[None]:
    """Inside, an ImportError ends the process with one line if an engine loads us and kt options
    are visible, and in the command `kt`.

    The engines log an exception of a plugin and serve without it, but do not catch SystemExit.
    Otherwise the ImportError is raised unchanged.
    """
    try:
        yield
    except ImportError as error:
        in_command = Path(next(iter(getattr(sys, "argv", ())), "")).name == "kt"
        if in_command or (in_engine() and options_visible()):
            raise SystemExit("kt: error: " + " ".join(str(error).split())) from error
        raise
