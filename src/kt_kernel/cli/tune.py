"""``kt tune``: measures this machine for a model, and recommends how to serve it."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Annotated

import typer

_MOST_STREAMS = 4096  # each is a thread while the engine is timed


def tune(
    model: Annotated[str, typer.Argument(help="model folder, or repository (org/name)")],
    engine: Annotated[
        str | None, typer.Option(help="vllm or sglang (default: the one that is installed)")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, max=_MOST_STREAMS, help="requests at a time")] = 1,
    context: Annotated[
        int | None,
        typer.Option(min=16, help="most tokens of a request (default: 8192, or the model's limit)"),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(min=1, help="tokens of a typical prompt (default: 2048, or what fits)"),
    ] = None,
    answer: Annotated[
        int | None,
        typer.Option(min=1, help="tokens of a typical answer (default: 256, or what fits)"),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="what the engine may take of the GPU, as 70GB (default: nine tenths)"),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="methods that may be chosen, as INT4_G32,AMXINT8 (default: as auto)"),
    ] = None,
    deferral: Annotated[
        int, typer.Option(min=0, help="most deferred experts per token; changes the results")
    ] = 0,
    hot_format: Annotated[str, typer.Option(help="as --kt-hot-format")] = "auto",
    kt_expert_stats: Annotated[
        str | None,
        typer.Option("--kt-expert-stats", help="statistics of the experts that tokens select"),
    ] = None,
    engine_args: Annotated[
        str, typer.Option(help="more arguments of the engine's server, such as --trust-remote-code")
    ] = "",
    measure_engine: Annotated[
        bool, typer.Option(help="start the engine with some layers to measure its own part")
    ] = True,
    check: Annotated[
        bool, typer.Option(help="serve the model with the recommended options and time it")
    ] = True,
    save: Annotated[bool, typer.Option(help="save the options for the next start")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Measure this machine for a model, and recommend how to serve it.

    Run it in the engine's environment. It measures the CPU's kernels, the GPU, the bus and the
    engine, predicts decoding and prompts for numbers of hot experts, threads and methods, and
    prints the command for the fastest one. A start without these options then uses them.
    """
    from ..serving.option_table import find_option
    from ..serving.option_values import checked_value
    from ..serving.server_process import ServerFailed
    from ..serving.tuned import check_place
    from ..serving.tuned import save as save_tuned
    from ..tuning.arguments import changes_of
    from ..tuning.choice import Goal
    from ..tuning.plan import find_model
    from ..tuning.run import check as check_run
    from ..tuning.run import tune as run_tune
    from ..tuning.wishes import Wishes, engine_of, with_lengths
    from .tune_report import describe, describe_all, text, text_checked

    size = None
    if gpu_memory is not None:
        try:
            size = checked_value(find_option("gpu_experts_memory"), gpu_memory)
        except ValueError:
            raise ValueError(
                f"--gpu-memory {gpu_memory}: expected a size in MB or GB, such as 70GB"
            ) from None
    hot_format = checked_value(find_option("hot_format"), hot_format)
    try:
        more = tuple(shlex.split(engine_args))
    except ValueError as error:
        raise ValueError(f"--engine-args {engine_args}: {error}") from None
    wishes = Wishes(
        Goal(streams=streams),
        engine=engine,
        gpu_memory=size,
        methods=_names(methods),
        deferral=deferral,
        hot_format=hot_format,
        statistics=kt_expert_stats,
        measure_engine=measure_engine,
        engine_arguments=more,
    )
    tuned = find_model(model, changes_of(engine_of(wishes)[0], more))
    wishes = with_lengths(wishes, tuned, context, prompt, answer)
    if save:
        try:
            check_place(tuned.config)
        except RuntimeError as error:  # no home folder
            raise ValueError(f"{error} Set XDG_CONFIG_HOME, or give --no-save") from None
    result = run_tune(tuned, wishes, _say)
    if not as_json:
        print(text(result), flush=True)  # the check takes minutes
    checked, failed = None, False
    if check and result.installed and tuned.checkpoint is not None:
        try:
            checked = check_run(result, _say)
        except ServerFailed as problem:
            failed = True
            _say(f"the check failed: {problem}")
    if as_json:
        print(json.dumps(describe_all(result, checked), indent=1))
    elif more_text := text_checked(result, checked):
        print(more_text)
    if save and failed:
        _say("the options are not saved, because the check failed; --no-check saves them")
    elif save:
        about = {key: value for key, value in describe(result, checked).items() if key != "options"}
        path = save_tuned(tuned.config, result.server.device, result.options, about, result.need)
        marked = " They are marked as measured on a busy machine." if about["disturbed"] else ""
        _say(f"saved to {path}: the next start uses these options where none is given.{marked}")


def _names(methods: str | None) -> tuple[str, ...]:
    if methods is None:
        return ()
    names = tuple(name.strip() for name in methods.split(","))
    if not all(names):
        raise ValueError(f"--methods {methods}: expected names such as INT4_G32,AMXINT8")
    return names


def _say(line: str) -> None:
    print(f"kt: {line}", file=sys.stderr, flush=True)
