"""Figures of matplotlib, which is optional."""

from __future__ import annotations

import io
from typing import Any


def png_of(figure: Any, dpi: int) -> bytes:
    """The content of a PNG file of a figure. dpi: pixels per inch of its size."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi)
    return picture.getvalue()
