"""matplotlib without a display, and the command line of what draws saved results.

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
    """plot(contents of the RESULTs, OUT) for the arguments OUT RESULT [RESULT ...]; SystemExit with
    ``usage`` for fewer."""
    if len(arguments) < 2:
        raise SystemExit(usage)
    plot([json.loads(Path(name).read_text()) for name in arguments[1:]], Path(arguments[0]))
