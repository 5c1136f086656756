"""Checks paths from users before anything is read."""

from __future__ import annotations

import errno
import os
from typing import Any

_SHOWN = 80  # characters of a path in a message about its length


def check_path(name: str, path: Any) -> str:
    """Returns ``path`` as a str. It need not exist.

    Raises TypeError or ValueError naming ``name`` if no file system accepts it as a path.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str or a path of str, got {type(path).__name__}")
    if not text:
        raise ValueError(f"{name} is empty; expected a file or folder")
    if "\0" in text:
        raise ValueError(f"{name} {text!r} contains a NUL character")
    try:
        os.stat(text)
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} {text!r}: {error}") from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            shown = text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
            raise ValueError(f"{name} {shown!r}: {error.strerror}") from None
    return text
