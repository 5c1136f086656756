"""Progress bars with rate and time left."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


def bytes_bar() -> Progress:
    """A progress bar in bytes on stderr; draws nothing if stderr is not a terminal."""
    return _bar(DownloadColumn(binary_units=True), TransferSpeedColumn())


def steps_bar() -> Progress:
    """The same in steps."""
    return _bar(MofNCompleteColumn())


def _bar(*columns: ProgressColumn) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
