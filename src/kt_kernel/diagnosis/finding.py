"""What a look at one part of the installation found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    OK = "ok"
    NOTE = "note"  # worth knowing; servers start
    PROBLEM = "problem"  # a start with kt options fails, or does without them


@dataclass(frozen=True)
class Finding:
    """subject: what was looked at. text: what was found, and for a problem what to do."""

    level: Level
    subject: str
    text: str


def ok(subject: str, text: str) -> Finding:
    return Finding(Level.OK, subject, text)


def note(subject: str, text: str) -> Finding:
    return Finding(Level.NOTE, subject, text)


def problem(subject: str, text: str) -> Finding:
    return Finding(Level.PROBLEM, subject, text)
