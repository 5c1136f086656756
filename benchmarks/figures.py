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

from kt_kernel.runtime.figures import png_of
from kt_kernel.runtime.files import write_output

__all__ = ["draw_saved", "plt", "save_figure"]


def draw_saved(
    plot: Callable[[list[dict[str, Any]], Path], None], arguments: list[str], usage: str | None
) -> None:
    """Calls plot(contents of the RESULTs, OUT) for the arguments OUT RESULT [RESULT ...]. Raises
    SystemExit with ``usage`` for fewer arguments."""
    if len(arguments) < 2:
        raise SystemExit(usage)
    plot([json.loads(Path(name).read_text()) for name in arguments[1:]], Path(arguments[0]))


def save_figure(figure: Any, path: Path, dpi: int) -> None:
    """Writes a figure as PNG, and forgets it. dpi: pixels per inch of its size."""
    write_output(path, png_of(figure, dpi))
    plt.close(figure)
