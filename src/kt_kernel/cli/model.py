"""``kt model``: checks models on disk, and shows how they use their experts."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .experts import info, stats

app = typer.Typer(
    help="Check models on disk, and how they use their experts.", no_args_is_help=True
)
app.command("info")(info)
app.add_typer(stats, name="stats")


@app.command()
def verify(
    path: Annotated[str, typer.Argument(help="packed directory or checkpoint")],
) -> None:
    """Compare a model's files with its manifest (sizes and checksums) or with its index.

    Prints each bad file. The exit code is 1 if there is one.
    """
    from ..conversion.verify import Watcher
    from ..conversion.verify import verify as check
    from .progress import bytes_bar

    with bytes_bar() as bar:

        class Shown(Watcher):
            def begin(self, total: int) -> None:
                self.task = bar.add_task("verifying", total=total)

            def read(self, count: int) -> None:
                bar.advance(self.task, count)

        verdict = check(path, Shown())
    for note in verdict.notes:
        print(f"kt: {note}", file=sys.stderr)
    for problem in verdict.problems:
        print(f"kt: error: {problem}", file=sys.stderr)
    if verdict.problems:
        raise typer.Exit(1)
    print(
        f"kt: {path}: {verdict.files} files, {verdict.bytes / 1e9:.2f} GB, match {verdict.against}"
    )
