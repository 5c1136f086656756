"""``kt quant``: converts a checkpoint's experts to a packed directory."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated

import typer

from ..weights.store.quant_methods import QUANT_METHODS
from .running import Interrupted

app = typer.Typer(add_completion=False)


class InputType(StrEnum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


# mypy wants literals here.
QuantMethod = StrEnum("QuantMethod", {name: name for name in QUANT_METHODS})  # type: ignore[misc]


@app.command()
def quant(
    source: Annotated[
        str | None, typer.Argument(metavar="INPUT", help="the same as --input-path")
    ] = None,
    target: Annotated[
        str | None, typer.Argument(metavar="OUTPUT", help="the same as --output")
    ] = None,
    input_path: Annotated[
        str | None, typer.Option("--input-path", "-i", help="checkpoint to convert: file or folder")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="folder for the packed layers")
    ] = None,
    quant_method: Annotated[
        QuantMethod | None, typer.Option(help="format of the packed experts")
    ] = None,
    input_type: Annotated[
        InputType | None,
        typer.Option(help="fail unless the experts have this type (default: any)"),
    ] = None,
    from_kt: Annotated[
        str | None,
        typer.Option(help="folder that kt-kernel converted; its weights are packed unchanged"),
    ] = None,
    scale_search: Annotated[
        bool,
        typer.Option(
            help="int4_g32, int4_g128: search the group scales with the least error (slower)"
        ),
    ] = True,
    threads: Annotated[
        int | None, typer.Option(min=1, help="packing threads (default: all cores)")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="continue a conversion that was interrupted")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="print the weight error of each layer")
    ] = False,
    report_json: Annotated[
        str | None, typer.Option(help="write the report to this file as JSON", metavar="FILE")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="with --report: also compute the model's loss on this text, before and after "
            "(needs transformers and memory for the model in float32)",
            metavar="FILE",
        ),
    ] = None,
) -> None:
    """Convert a checkpoint's experts to a packed directory for --kt-weight-path.

    The input is only read. Layers are written one by one; --resume continues an interrupted
    conversion. With --report and --resume, a finished conversion is only reported on.
    """
    path = _one("the input", INPUT=source, input_path=input_path, from_kt=from_kt)
    folder = _one("the output", OUTPUT=target, output=output)
    if quant_method is None and from_kt is None:
        raise typer.BadParameter("required unless --from-kt is given", param_hint="--quant-method")
    from ..conversion import Request, convert, make_plan
    from ..runtime.text import shown_size
    from .quant_progress import Shown
    from .quant_report import Report

    after = Report(path, folder, report, report_json, text, from_kt is not None, threads)
    request = Request(
        input_path=path,
        output=folder,
        method=quant_method and QUANT_METHODS[quant_method.value],
        input_type=input_type and input_type.value,
        threads=threads,
        resume=resume,
        from_kt=from_kt is not None,
        scale_search=scale_search,
    )
    started = time.monotonic()
    plan = make_plan(request)
    try:
        with Shown() as progress:
            convert(plan, progress)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; run the same command with --resume to continue") from None
    seconds, total = time.monotonic() - started, plan.bytes_of(plan.specs)
    print(
        f"kt: {folder}: {len(plan.specs)} layers for method {plan.method}, {shown_size(total)}, "
        f"in {seconds:.0f} s"
    )
    after.make(plan.method)


def _one(what: str, **given: str | None) -> str:
    """The value of the one option among several equivalent ones that was given."""
    values = {name: value for name, value in given.items() if value is not None}
    names = [n if n.isupper() else "--" + n.replace("_", "-") for n in given]
    if len(values) != 1:
        problem = "is missing" if not values else "was given more than once"
        raise typer.BadParameter(f"{what} {problem}; give one of {', '.join(names)}")
    return next(iter(values.values()))
