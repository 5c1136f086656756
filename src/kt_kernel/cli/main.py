"""Assembles the command ``kt`` from its subcommands."""

from __future__ import annotations

import sys

import typer

from . import bench, cache, doctor, model, quant, sft, tune, version
from .running import run

app = typer.Typer(
    help="Tools for Mixture-of-Experts models with experts on the CPU.",
    add_completion=False,
    no_args_is_help=True,
)
app.command("quant")(quant.quant)
app.add_typer(bench.app, name="bench")
app.command("cache")(cache.cache)
app.command("doctor")(doctor.doctor)
app.add_typer(model.app, name="model")
app.add_typer(sft.app, name="sft")
app.command("tune")(tune.tune)
app.command("version")(version.version)


def main() -> None:
    """The console script."""
    if sys.argv[1:3] == ["sft", "train"]:
        sft.let_threads_sleep()
    sys.exit(run(app))
