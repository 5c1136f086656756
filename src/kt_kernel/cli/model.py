"""``kt model``: checks models and model classes, and shows how models use their experts."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .experts import info, stats

app = typer.Typer(
    help="Check models and model classes, and how they use their experts.", no_args_is_help=True
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
    from ..runtime.text import shown_size
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
        f"kt: {path}: {verdict.files} files, {shown_size(verdict.bytes)}, match {verdict.against}"
    )


@app.command("check")
def check_class(
    model: Annotated[
        str, typer.Argument(help="model folder, config.json, or repository (org/name)")
    ],
    engine: Annotated[
        str | None, typer.Option(help="vllm or sglang (default: the one that is installed)")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu (default: a GPU if there is one)")
    ] = None,
) -> None:
    """Check whether --kt-allow-untested is safe for a model's class.

    Makes a small random model of the class, serves it with the installed engine, stock and with kt
    options, and compares log-probabilities. Only config.json is read. The exit code is 1 if it is
    not safe.
    """
    from ..serving.class_check import check_class, installed_engine, read_config

    if device not in (None, "cuda", "cpu"):
        raise ValueError(f"--device {device}: unknown device; accepted: cuda, cpu")
    chosen = installed_engine(engine)
    config = read_config(model)
    try:
        verdict = check_class(
            config, chosen, device=device, say=lambda line: print(f"kt: {line}", file=sys.stderr)
        )
    except RuntimeError as error:
        print(f"kt: error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    for name, distance in verdict.distances.items():
        what = "experts in the wrong places" if name == "control" else name
        print(f"kt: {what}: log-probabilities differ from the stock engine's by {distance:.4f}")
    where = f"{verdict.classes} in {verdict.engine} {verdict.version} on {verdict.device}"
    if not verdict.safe:
        print(f"kt: error: {where}: not safe: {verdict.problem}", file=sys.stderr)
        raise typer.Exit(1)
    print(f"kt: {where}: --kt-allow-untested is safe")
