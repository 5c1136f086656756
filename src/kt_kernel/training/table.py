"""Generates the tables of keys in docs/fine-tuning.md.

python -m kt_kernel.training.table
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .settings import SECTIONS


def tables() -> str:
    """A table for each section, in Markdown."""
    return "\n\n".join(_table(name, kind) for name, kind in SECTIONS.items())


def _table(name: str, kind: type) -> str:
    lines = [f"| `[{name}]` | default | meaning |", "| --- | --- | --- |"]
    for field in dataclasses.fields(kind):
        about = field.metadata
        lines.append(
            f"| `{field.name}` | {about['shown'] or _shown(field.default)} | {about['meaning']} |"
        )
    return "\n".join(lines)


def _shown(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "required"
    if isinstance(default, bool):
        return str(default).lower()
    return f"`{default}`" if isinstance(default, str) else f"{default:g}"


if __name__ == "__main__":
    print(tables())
