"""Shared by the plots of saved results: matplotlib without a display, and the command line.

matplotlib's version is in constraints.txt.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ImportError:
    raise SystemExit("plots need matplotlib: pip install -c constraints.txt matplotlib") from None
matplotlib.use("Agg")
import matplotlib.pyplot as plt

__all__ = ["draw_saved", "plt"]


def draw_saved(
    plot: Callable[[list[dict[str, Any]], Path], None], arguments: list[str], usage: str | None
) -> None:
    """Calls plot(contents of the RESULTs, OUT) for the arguments OUT RESULT [RESULT ...]. Raises
    SystemExit with ``usage`` for fewer arguments."""
    if len(arguments) < 2:
        raise SystemExit(usage)
    plot([json.loads(Path(name).read_text()) for name in arguments[1:]], Path(arguments[0]))
