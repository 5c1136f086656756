"""``kt bench experts``: replays recorded routes through caches of hot experts."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Annotated, Any

import typer

_SHARES = (0.12, 0.25, 0.4)  # of the experts, if no numbers of slots are given


def experts(
    file: Annotated[str, typer.Argument(help="file that --record-kt-expert-routes wrote")],
    slots: Annotated[
        str | None,
        typer.Option(help="hot experts per layer, as 16,32,64 (default: 12, 25 and 40% of all)"),
    ] = None,
    streams: Annotated[
        int, typer.Option(min=1, help="simulate this many requests that are decoded in parallel")
    ] = 1,
    uploads: Annotated[
        float | None,
        typer.Option(min=0, help="experts that a layer may upload after a pass (default: all)"),
    ] = None,
    times: Annotated[
        str | None,
        typer.Option(
            metavar="STEP,MISS,UPLOAD,BESIDE[,HIDDEN]",
            help="also predict tokens/s, from milliseconds: of a step with every expert hot, of a "
            "missed expert, of an upload, that an upload adds to the step beside it, and that "
            "missed experts of a layer are hidden behind the GPU's (default: 0)",
        ),
    ] = None,
    bus_share: Annotated[
        float, typer.Option(min=0, max=1, help="of the bus, that uploads may take, with --times")
    ] = 0.25,
    prompts: Annotated[
        bool, typer.Option("--prompts", help="include tokens that shared a pass, such as prompts")
    ] = False,
    plot: Annotated[
        str | None, typer.Option(metavar="PNG", help="also draw the hit rates to this file")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show which experts to keep on the GPU: how often fixed placements and caches would be hit."""
    from ..routes import costs
    from ..routes.compare import compare, table
    from ..routes.locality import reuse
    from ..routes.plots import check_plot, plot_policies
    from ..routes.record import RouteRecord
    from ..routes.simulator import as_streams

    if uploads == math.inf:
        raise ValueError("--uploads inf: expected a number; without the option, all are uploaded")
    seconds = None if times is None else _seconds(times)
    if plot is not None:
        check_plot(plot)
    record = RouteRecord.load(file)
    seen = len(record.passes)
    if not prompts:
        record = record.decoded
    if len(record.passes) < 2:
        raise ValueError(
            f"{file}: {len(record.passes)} of {seen} tokens had a pass of their own; record one "
            "request at a time, or add --prompts"
        )
    locality = {within: reuse(record.routes, within) for within in (1, 8)}
    if streams > 1:
        record = as_streams(record, streams)
    counts = _numbers(slots, record.model.num_experts)
    results = compare(record, counts, uploads)
    predicted = (
        costs.predictions(record, counts, costs.Costs(*seconds), bus_share) if seconds else []
    )
    if plot is not None:
        plot_policies({record.model.describe(): results}, plot)
    if as_json:
        found: Any = [asdict(result) for result in results]
        if predicted:
            found = {"results": found, "predicted": [asdict(each) for each in predicted]}
        print(json.dumps(found, indent=1))
        return
    print(
        f"{record.model.describe()}: {len(record.passes)} tokens in {len(record.layers)} layers; "
        f"{locality[1]:.0%} of the uses of an expert repeat one of the token before, "
        f"{locality[8]:.0%} of the 8 before\n"
    )
    print(table(results))
    if predicted:
        print(f"\nPredicted with {bus_share:.0%} of the bus:\n\n{costs.table(predicted)}")


def _numbers(text: str | None, experts: int) -> list[int]:
    if text is None:
        return sorted({max(1, round(share * experts)) for share in _SHARES})
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--slots {text}: expected numbers such as 16,32,64") from None


def _seconds(text: str) -> list[float]:
    try:
        found = [float(part) / 1e3 for part in text.split(",")]
        known = all(0 <= seconds < math.inf for seconds in found)
        if len(found) in (4, 5) and known and found[0] > 0 and found[2] > 0:
            return found
    except ValueError:
        pass
    raise ValueError(
        f"--times {text}: expected four or five numbers of milliseconds such as 1.3,0.19,0.5,0.1; "
        "the first and the third must be more than 0"
    )
