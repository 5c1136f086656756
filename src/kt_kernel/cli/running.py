"""Runs commands: reports errors in one line, and sets the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from ..runtime.signals import left_by_signals

USAGE, INTERRUPTED = 2, 130  # exit codes; 1 for all other failures


class Interrupted(Exception):
    """Raised instead of KeyboardInterrupt to add a message."""


def run(application: typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0, 1 for failures, 2 for wrong usage, 130 if it was
    interrupted. Errors are printed to stderr in one line; KT_KERNEL_DEBUG=1 shows the traceback.

    Raises SystemExit after SIGTERM, and SIGHUP, see `left_by_signals`.
    """
    try:
        with left_by_signals():
            result = application(arguments, prog_name="kt", standalone_mode=False)
    except Interrupted as error:
        return _say(str(error), INTERRUPTED)
    except Exception as error:
        if os.environ.get("KT_KERNEL_DEBUG") == "1":
            raise
        # Usage errors and Abort are click's classes, which newer versions of typer bundle.
        if hasattr(error, "format_message"):
            message = error.format_message()  # empty if the help was shown instead
            return _say(message, USAGE) if message else USAGE
        if type(error).__name__ == "Abort":
            return _say("interrupted", INTERRUPTED)
        if isinstance(error, OSError) and error.strerror and error.filename is not None:
            name = (
                error.filename if isinstance(error.filename, int) else os.fsdecode(error.filename)
            )
            return _say(f"{'an empty path' if name == '' else name}: {error.strerror}", 1)
        if isinstance(error, OSError | ValueError | ImportError | MemoryError | KeyError):
            return _say(str(error) or type(error).__name__, 1)
        raise
    if result == INTERRUPTED:
        return _say("interrupted", INTERRUPTED)
    return result if isinstance(result, int) else 0


def _say(message: str, code: int) -> int:
    print("kt: error: " + " ".join(message.split()), file=sys.stderr)
    return code
