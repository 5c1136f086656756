"""Checks the values of single server options, wherever they come from."""

import math
import os
import re
from pathlib import Path
from typing import Any

from ..runtime.files import followed
from ..runtime.text import SIZES
from ..weights.methods import METHODS
from .option_table import AUTO, HOT_FORMATS, STRATEGIES, SWITCH, Option, OptionError
from .repository import Repository


def checked_value(option: Option, value: Any) -> Any:
    """The value in the type that KTOptions has. Raises OptionError naming flag and value."""
    flag = option.flag
    if not option.supported:
        raise OptionError(f"{flag} is not supported by this version: {option.why_not}")
    if option.kind == "flag":
        if not isinstance(value, bool):
            raise OptionError(f"{flag} {value!r}: expected true or false")
        return value
    if option.kind == "switch":
        return _switch(flag, value)
    if option.kind == "tokens" and value == AUTO:
        return AUTO
    if option.kind in ("int", "tokens"):
        try:
            number = None if isinstance(value, (bool, float)) else int(value)
        except (TypeError, ValueError):
            number = None
        if number is None or not option.minimum <= number < 2**31:
            accepted = f" or {AUTO}" if option.kind == "tokens" else ""
            raise OptionError(
                f"{flag} {value}: expected an integer of at least {option.minimum}{accepted}"
            )
        return number
    if option.kind == "ratio":
        return _ratio(flag, value)
    if option.kind == "size":
        return _bytes_of(flag, value)
    if not isinstance(value, (str, os.PathLike)):
        raise OptionError(f"{flag} {value!r}: expected text")
    text = os.fspath(value)
    if option.kind == "path":
        _check_exists(flag, text)
    if option.kind == "file" and not os.path.isfile(text):
        raise OptionError(f"{flag} {text}: no such file")
    if option.kind == "new file":
        check_writable(flag, text)
    if option.kind == "strategy" and text not in STRATEGIES:
        raise OptionError(f"{flag} {text}: unknown; accepted: {', '.join(STRATEGIES)}")
    if option.kind == "hot format" and text not in (AUTO, *HOT_FORMATS):
        raise OptionError(f"{flag} {text}: unknown; accepted: {', '.join((AUTO, *HOT_FORMATS))}")
    if option.kind == "method" and text not in (AUTO, *METHODS):
        accepted = ", ".join((AUTO, *METHODS))
        raise OptionError(f"{flag} {text}: unknown method; accepted: {accepted}")
    return text


def _switch(flag: str, value: Any) -> str:
    if isinstance(value, str):  # SGLang passes YAML's on and off as these
        value = {"true": True, "false": False}.get(value, value)
    if isinstance(value, bool):
        return "on" if value else "off"
    if value not in SWITCH:
        raise OptionError(f"{flag} {value}: expected {', '.join(SWITCH)}")
    return str(value)


def _bytes_of(flag: str, value: Any) -> int:
    """A size in bytes: an integer of bytes, or a number with a unit."""
    size = 0.0
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(MB|GB)", value.strip())
        size = float(found[1]) * SIZES[found[2]] if found else 0.0  # of many digits: infinity
    if not 1 <= size < 2**50:
        raise OptionError(f"{flag} {value}: expected a size in MB or GB, such as 1536MB or 2GB")
    return int(size)


def _ratio(flag: str, value: Any) -> float:
    try:
        ratio = math.nan if isinstance(value, bool) else float(value)
    except (OverflowError, TypeError, ValueError):
        ratio = math.nan
    if not 0 <= ratio <= 1:
        raise OptionError(f"{flag} {value}: expected a number from 0 to 1")
    return ratio


def check_writable(flag: str, text: str) -> None:
    """Raises OptionError unless a file that is written again and again can be there. flag: of the
    option, or the name of a variable."""
    try:
        folder = os.path.dirname(os.path.abspath(followed(text))) if text else ""
    except (OSError, ValueError) as error:  # ValueError: a NUL
        raise OptionError(f"{flag} {text}: {getattr(error, 'strerror', None) or error}") from None
    if not os.path.isdir(folder):
        raise OptionError(f"{flag} {text}: its folder does not exist")
    if not os.access(folder, os.W_OK):
        raise OptionError(f"{flag} {text}: its folder cannot be written to")


def _check_exists(flag: str, text: str) -> None:
    try:
        found = bool(text) and Path(text).exists()
    except (OSError, ValueError) as error:  # a name that is too long, an unreadable folder
        raise OptionError(f"{flag} {text}: {getattr(error, 'strerror', None) or error}") from None
    if not found and Repository.parse(text) is None:
        raise OptionError(
            f"{flag} {text}: no such file or folder, and not a repository name (org/name)"
        )
