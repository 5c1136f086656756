"""``kt sft``: fine-tuning."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from .running import Interrupted

app = typer.Typer(help="Fine-tune experts on the CPU.", no_args_is_help=True)
_RESUME = "run the same command with --resume to continue"


def let_threads_sleep() -> None:
    """Starts this process again with ``OMP_WAIT_POLICY=PASSIVE``, unless the variable is set.

    Otherwise the threads of torch's CPU operations spin while they wait, on the CPUs that the
    experts need. OpenMP reads the variable when torch is imported, and this package imports torch.
    """
    if "OMP_WAIT_POLICY" in os.environ or not sys.executable:
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@app.callback()
def _group() -> None:  # keeps "train" a subcommand although it is the only one
    pass


@app.command()
def train(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG", help="settings in TOML; docs/fine-tuning.md lists the keys"
        ),
    ],
    resume: Annotated[
        bool, typer.Option("--resume", help="continue from the last whole checkpoint")
    ] = False,
    output: Annotated[
        str | None,
        typer.Option(help="folder for the results, instead of the file's", metavar="FOLDER"),
    ] = None,
) -> None:
    """Train a LoRA adapter on the experts of a transformers model.

    Settings, files and the model's configuration are checked before its weights are read. Ctrl-C
    ends the run after the current step and saves a checkpoint.
    """
    from ..training.run import Stopped, train
    from ..training.settings import read_settings
    from .sft_progress import Shown, summary

    settings = read_settings(config, output)
    with Shown() as progress:
        try:
            result = train(settings, resume=resume, progress=progress)
        except FloatingPointError as error:
            raise ValueError(
                f"{error}. The training diverged; try a lower learning_rate"
            ) from error
        except Stopped as stopped:
            raise Interrupted(f"{stopped}; {_RESUME}") from None
        except KeyboardInterrupt:
            last = progress.last_saved
            hint = (
                "no checkpoint yet" if last is None else f"last checkpoint: step {last}; {_RESUME}"
            )
            raise Interrupted(f"interrupted; {hint}") from None
    print(summary(result))
