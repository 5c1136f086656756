"""``kt bench``: analyses traces and recorded routes."""

from __future__ import annotations

from typing import Annotated

import typer

from .bench_experts import experts

app = typer.Typer(help="Analyse traces and recorded routes.", no_args_is_help=True)
app.command("experts")(experts)


@app.command()
def trace(
    file: Annotated[
        str, typer.Argument(help="trace file that KT_TRACE wrote; the server may still be running")
    ],
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="analyse passes with this many tokens (default: the most common number)"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show where MoE layers spend their time: CPU, GPU, transfers, and waiting for the CPU."""
    from ..trace.reader import read
    from ..trace.summary import summarise
    from .bench_report import text, to_json

    events = read(file)
    try:
        summary = summarise(events, tokens)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    print(to_json(summary) if as_json else text(summary))
