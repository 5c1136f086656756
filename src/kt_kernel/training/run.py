"""`train`: a whole run, from the checked settings to the adapter."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..runtime.file_lock import FileLock
from ..runtime.files import need_folder, need_replaceable, parse_object, replace_file
from .checkpoints import last_whole
from .documents import check_files
from .progress import Progress
from .results import Metrics, curves, plot
from .settings import Settings, check_steps, fixed_values

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerState

    from .blocks import Data

#: Names inside the output folder.
RUN, METRICS, PLOT, ADAPTER, CHECKPOINTS, LOCK = (
    "run.json",
    "metrics.json",
    "loss.png",
    "adapter",
    "checkpoints",
    "run.lock",
)


class Stopped(Exception):
    """A signal stopped the run, after a complete checkpoint was written."""


@dataclass(frozen=True)
class Result:
    """The metrics of a run and the paths of its results. plot: None if not requested."""

    metrics: Metrics
    adapter: str
    metrics_file: str
    plot: str | None


def train(settings: Settings, *, resume: bool = False, progress: Progress | None = None) -> Result:
    """Trains an adapter, measures the held-out loss, and writes all results to the output folder.

    Args:
        resume: continue the run whose checkpoints are in the output folder.

    Raises:
        ImportError: a library is not installed.
        OSError, ValueError: settings that do not fit the model or the data; an output folder with
            another run, or none to resume, or in which a process is training (BlockingIOError). All
            of them before the weights are read.
        Stopped: a signal came; the run can be resumed.
        FloatingPointError, RuntimeError: the training diverged, see ``KTMoEWrapper``.
    """
    progress = progress or Progress()
    need_libraries(settings)
    folder = settings.output.folder
    _find_checkpoint(folder, resume)
    _need_results(folder)
    check_files((*settings.data.train, *settings.data.held_out))
    _check_process()

    import transformers

    from .blocks import make_data
    from .encoding import Encoder
    from .model import check_model, check_vocabulary

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    on_cpu = _on_cpu(settings)
    config = check_model(settings)
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model.path)
    given = settings.data
    data = make_data(
        Encoder(tokenizer, given.assistant_only),
        given.train,
        given.held_out,
        given.held_out_fraction,
        given.sequence_length,
    )
    check_vocabulary(data, config)
    check_steps(settings.training, len(data.train))
    progress.stage(
        f"data: {data.train.tokens:,} tokens to train on, in {len(data.train):,} blocks; "
        f"{data.held_out.tokens:,} held out"
    )
    os.makedirs(os.path.join(folder, CHECKPOINTS), exist_ok=True)
    with _only_run(folder):
        checkpoint = _find_checkpoint(folder, resume)  # another run may have ended meanwhile
        identity = fixed_values(settings) | {"data": data.digest}
        if checkpoint is not None:
            _check_same_run(folder, identity)
        replace_file(os.path.join(folder, RUN), _json(identity))
        return _train(settings, data, checkpoint, on_cpu, progress)


def _train(
    settings: Settings, data: Data, checkpoint: str | None, on_cpu: bool, progress: Progress
) -> Result:
    """Loads and trains the model, from a checkpoint on if there is one, and writes the results."""
    import transformers

    from ..sft.adapters import save_adapter
    from .loop import trainable
    from .model import load_model

    folder = settings.output.folder
    transformers.set_seed(settings.training.seed)
    progress.stage(f"loading {settings.model.path}")
    model = load_model(settings)
    count = sum(parameter.numel() for parameter in trainable(model).values())
    progress.stage(f"experts packed as {settings.model.method}; {count:,} parameters to train")
    state, seconds, rate = _fit(settings, model, data, checkpoint, on_cpu, progress)
    train_curve, held_out_curve = curves(state.log_history)
    metrics = Metrics(
        steps=state.global_step,
        train=train_curve,
        held_out=held_out_curve,
        train_tokens=data.train.tokens,
        held_out_tokens=data.held_out.tokens,
        seconds=seconds,
        tokens_per_second=rate,
    )
    result = Result(
        metrics,
        os.path.join(folder, ADAPTER),
        os.path.join(folder, METRICS),
        os.path.join(folder, PLOT) if settings.output.plot else None,
    )
    save_adapter(
        model, result.adapter, layout=settings.output.layout, base_model=settings.model.path
    )
    replace_file(result.metrics_file, _json(metrics.to_json(fixed_values(settings))))
    if result.plot is not None:
        plot(metrics, result.plot, os.path.basename(settings.model.path))
    return result


def _fit(
    settings: Settings,
    model: nn.Module,
    data: Data,
    checkpoint: str | None,
    on_cpu: bool,
    progress: Progress,
) -> tuple[TrainerState, float, float]:
    """Trains. Returns the last state, and the seconds and tokens/s of this process's steps."""
    from . import loop

    if checkpoint is not None:
        loop.check_checkpoint(checkpoint, model)
        finished = loop.finished_state(checkpoint)
        if finished is not None:
            loop.load_weights(checkpoint, model)
            return finished, 0.0, 0.0
    folder = os.path.join(settings.output.folder, CHECKPOINTS)
    arguments = loop.training_arguments(settings, folder, on_cpu, checkpoint is not None)
    trainer = loop.LoraTrainer(model, arguments, data, progress)
    with loop.interrupts(progress.stopping) as stop:
        schedule = loop.Schedule(trainer, settings.training, progress, stop)
        trainer.add_callback(schedule)
        trainer.train(resume_from_checkpoint=checkpoint)
    state = trainer.state
    if state.global_step < state.max_steps:
        raise Stopped(f"stopped after step {state.global_step} of {state.max_steps}")
    return state, schedule.seconds, schedule.rate


def need_libraries(settings: Settings) -> None:
    """Raises ImportError, with the command that installs them, for libraries that are missing."""
    wanted = {
        "transformers": True,
        "accelerate": True,
        "peft": bool(settings.lora.attention_modules),
        "matplotlib": settings.output.plot,
    }
    missing = [name for name, needed in wanted.items() if needed and find_spec(name) is None]
    if missing:
        raise ImportError(
            f"not installed: {', '.join(missing)}; install with: pip install 'kt-moe[sft]'"
        )


def _find_checkpoint(folder: str, resume: bool) -> str | None:
    """The checkpoint to resume from. ValueError if there is none, or a run that is not resumed."""
    found = last_whole(os.path.join(folder, CHECKPOINTS))
    if resume:
        if found is None:
            raise ValueError(f"{folder}: no whole checkpoint to resume from; run without --resume")
        return found[1]
    earlier = found or os.path.exists(os.path.join(folder, ADAPTER))
    if earlier:
        raise ValueError(
            f"{folder}: holds another run; add --resume to continue it, or choose another folder"
        )
    return None


@contextmanager
def _only_run(folder: str) -> Iterator[None]:
    """Holds the lock of an output folder. BlockingIOError naming it if another process has it."""
    lock = FileLock(os.path.join(folder, LOCK))
    if not lock.acquire(0):
        message = "another kt sft train is running in this folder; choose another one, or end it"
        raise BlockingIOError(errno.EWOULDBLOCK, message, folder)
    try:
        yield
    finally:
        lock.release()


def _need_results(folder: str) -> None:
    """OSError if the results cannot be written."""
    need_folder(folder)
    for name in (RUN, METRICS, PLOT) if os.path.isdir(folder) else ():
        need_replaceable(os.path.join(folder, name))


def _check_same_run(folder: str, identity: Mapping[str, Any]) -> None:
    path = os.path.join(folder, RUN)
    with open(path, "rb") as file:
        before = parse_object(file.read(), f"{path}: ")
    now = json.loads(_json(identity))
    for name in before | now:
        if before.get(name) != now.get(name):
            if name == "data":
                raise ValueError(
                    f"{folder}: the data changed since this run began; choose another folder"
                )
            raise ValueError(
                f"{folder}: this run began with {name} = {before.get(name)!r}, now it is "
                f"{now.get(name)!r}; set it back, or choose another folder"
            )


def _check_process() -> None:
    """ValueError if this is one of several processes."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise ValueError(
            f"WORLD_SIZE={ranks}: kt sft train runs in one process; for several, use "
            "kt_kernel.sft.wrap_experts in a training script"
        )


def _on_cpu(settings: Settings) -> bool:
    """Whether the model stays on the CPU. ValueError for several GPUs: Trainer would copy the model
    to each."""
    import torch

    count = 0 if settings.model.device == "cpu" else torch.cuda.device_count()
    if count > 1:
        raise ValueError(
            f"{count} GPUs are visible, kt sft train uses one; choose it with CUDA_VISIBLE_DEVICES"
        )
    return count == 0


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"
