"""Parses names of repositories on the Hugging Face hub."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:/(?P<inside>[^@]+))?(?:@(?P<revision>.+))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Repository:
    """A repository, or a file or folder in it.

    Attributes:
        name: ``org/name``.
        inside: path of the file or folder; "": the whole repository.
        revision: branch, tag or commit; None: the main branch.
    """

    name: str
    inside: str = ""
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> Repository | None:
        """Parses ``org/name[/inside][@revision]``; None if the text has another form."""
        match = _NAME.fullmatch(text)
        if match is None or ".." in text:
            return None
        inside = (match["inside"] or "").strip("/")
        return cls(match["name"], inside, match["revision"])
