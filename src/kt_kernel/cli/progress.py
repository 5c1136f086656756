"""Progress bars with rate and time left."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from ..runtime.text import SIZES


class SizeColumn(ProgressColumn):
    """Bytes done and in all, in the units of all sizes."""

    def render(self, task: Task) -> Text:
        total = task.total or 0
        unit = "GB" if total >= SIZES["GB"] else "MB"
        done, whole = (f"{size / SIZES[unit]:,.1f}" for size in (task.completed, total))
        return Text(f"{done}/{whole} {unit}", style="progress.download")


def bytes_bar() -> Progress:
    """A progress bar in bytes on stderr; draws nothing if stderr is not a terminal."""
    return _bar(SizeColumn(), TransferSpeedColumn())


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
