"""Reads the statistics in a file, whichever kind it is."""

from __future__ import annotations

import os

from . import files, record
from .record import RouteRecord
from .statistics import ExpertStatistics


def statistics_of(path: str | os.PathLike[str]) -> ExpertStatistics:
    """The statistics of a file, or those that follow from a record of routes. Raises OSError, or
    ValueError naming the file."""
    if files.kind_of(os.fspath(path)) == record.KIND:
        return RouteRecord.load(path).statistics()
    return ExpertStatistics.load(path)
