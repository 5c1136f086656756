"""``kt bench``: what measurements say."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(help="What measurements say.", no_args_is_help=True)


@app.callback()
def _group() -> None:  # keeps "trace" a word of its own while it is the only command
    pass


@app.command()
def trace(
    file: Annotated[str, typer.Argument(help="what KT_TRACE wrote; it may still be written to")],
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="passes with so many tokens; not given: the commonest number"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the same as JSON")] = False,
) -> None:
    """Says where the time of MoE layers went: CPU, GPU, transfers, and the wait for the CPU."""
    from ..trace.reader import read
    from ..trace.summary import summarise
    from .bench_report import text, to_json

    events = read(file)
    try:
        summary = summarise(events, tokens)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    print(to_json(summary) if as_json else text(summary))
