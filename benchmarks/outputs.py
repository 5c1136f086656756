"""Files for results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def output_file(text: str) -> Path:
    """The type of an argument that names such a file: an error before anything is measured if the
    file cannot be written."""
    # Some programs run beside a package of another project that has the same name.
    from kt_kernel.runtime.files import need_writable

    try:
        need_writable(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error.strerror}") from None
    return Path(text)


def output_files(*suffixes: str) -> Callable[[str], str]:
    """The same for an argument that names several files, without their suffixes."""

    def checked(text: str) -> str:
        for suffix in suffixes:
            output_file(text + suffix)
        return text

    return checked


def save_result(path: str | Path, result: Any) -> None:
    """Writes a result as JSON. A run that is killed leaves the one that was saved before."""
    from kt_kernel.runtime.files import write_output

    write_output(path, json.dumps(result, indent=1) + "\n")
