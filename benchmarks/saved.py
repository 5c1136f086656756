"""Reads saved results."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")

Content = dict[str, Any]


@functools.cache
def load(name: str) -> Content:
    """The content of a result, named without `.json`."""
    return json.loads((RESULTS / f"{name}.json").read_text())


@functools.cache
def rows(name: str) -> dict[str, Content]:
    """The rows of a served result by their names."""
    return {row["name"]: row for row in load(name)["rows"]}
