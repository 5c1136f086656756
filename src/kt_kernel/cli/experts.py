"""``kt model info`` and ``kt model stats``: which experts a model uses."""

from __future__ import annotations

from typing import Annotated

import typer

stats = typer.Typer(help="Work with statistics of experts.", no_args_is_help=True)

_FILE = "file that --record-kt-gpu-expert-distribution or --record-kt-expert-routes wrote"


@stats.callback()
def _group() -> None:  # keeps "merge" a subcommand although it is the only one
    pass


def info(
    experts: Annotated[str, typer.Option("--experts", metavar="FILE", help=_FILE)],
    plot: Annotated[
        str | None, typer.Option("--plot", metavar="PNG", help="also draw the map to this file")
    ] = None,
) -> None:
    """Show how often each expert was selected, as a heat map of layers and experts."""
    from ..routes.heat_map import heat_map
    from ..routes.load import statistics_of
    from ..routes.plots import check_plot, plot_heat_map

    if plot is not None:
        check_plot(plot)
    statistics = statistics_of(experts)
    if plot is not None:
        plot_heat_map(statistics, plot)
    print(heat_map(statistics))


@stats.command()
def merge(
    files: Annotated[list[str], typer.Argument(help="statistics of one model, the oldest first")],
    output: Annotated[str, typer.Option("--output", "-o", help="file to write")],
    decay: Annotated[
        float,
        typer.Option(help="factor, above 0 and up to 1, by which a file counts less than the next"),
    ] = 1.0,
) -> None:
    """Add statistics of several servers or days up.

    Files of another model are refused.
    """
    from ..routes.load import statistics_of
    from ..routes.statistics import merge as merged
    from ..runtime.files import need_writable

    need_writable(output)
    result = merged([statistics_of(file) for file in files], files, decay)
    result.save(output, again=False)
    print(
        f"kt: {output}: {len(files)} files, {len(result.layers)} layers, "
        f"{result.tokens.max():,.0f} tokens of {result.model.describe()}"
    )
