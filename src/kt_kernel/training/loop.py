"""transformers' Trainer as `kt sft train` runs it: what is saved, measured and shown, and when."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIGINT, SIGTERM, Signals, getsignal, signal
from threading import Thread, current_thread, main_thread
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME

from .blocks import Blocks, Data
from .checkpoints import mark_whole, remove_old
from .encoding import IGNORED
from .progress import Progress
from .settings import Settings, Training

#: Trainer reads a checkpoint's parameters from this file.
WEIGHTS = "model.safetensors"


class LoraTrainer(Trainer):
    """Saves the trainable parameters only, and measures the loss per token on the held-out blocks.

    Args:
        data: training and held-out blocks.
        progress: receives the events of the run.
    """

    def __init__(
        self, model: nn.Module, args: TrainingArguments, data: Data, progress: Progress
    ) -> None:
        super().__init__(model, args, train_dataset=data.train, eval_dataset=data.held_out)
        self.remove_callback(PrinterCallback)
        self._model, self._held_out, self._progress = model, data.held_out, progress
        self.tokens_seen = 0  # by this process

    def training_step(self, model: nn.Module, inputs: Any, *arguments: Any) -> torch.Tensor:
        self.tokens_seen += inputs["input_ids"].numel()
        return super().training_step(model, inputs, *arguments)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the trainable parameters, which resuming needs; the others are the model's."""
        folder = output_dir or str(self.args.output_dir)
        os.makedirs(folder, exist_ok=True)
        found = {name: p.detach().cpu().contiguous() for name, p in trainable(self._model).items()}
        save_file(found, os.path.join(folder, WEIGHTS), metadata={"format": "pt"})

    def _save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        """Trainer's own. The libraries that write its files have errors of their own for a disk
        that is full, which do not name the place."""
        try:
            super()._save_checkpoint(*arguments, **named)
        except (SafetensorError, RuntimeError, OSError) as error:
            raise OSError(
                f"{self.args.output_dir}: the checkpoint of step {self.state.global_step} cannot "
                f"be written: {error}; whole checkpoints stay, and --resume continues from them"
            ) from error

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        """The held-out loss: the mean over all tokens whose loss counts."""
        metrics = {"eval_loss": self._held_out_loss(self._held_out)}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    @torch.no_grad()
    def _held_out_loss(self, blocks: Blocks) -> float:
        model, size = self._model, self.args.per_device_train_batch_size
        training = model.training
        model.eval()
        total, counted = 0.0, 0
        for first in range(0, len(blocks), size):
            self._progress.measuring(first, len(blocks))
            ids, labels = (t[first : first + size] for t in (blocks.ids, blocks.labels))
            count = int((labels[:, 1:] != IGNORED).sum())
            if count:
                inputs = {"input_ids": ids.long(), "labels": labels.long()}
                with self.compute_loss_context_manager():
                    loss = model(**self._prepare_inputs(inputs)).loss
                total, counted = total + float(loss) * count, counted + count
        self._progress.measuring(len(blocks), len(blocks))
        model.train(training)
        return total / counted


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def check_checkpoint(checkpoint: str, model: nn.Module) -> None:
    """Raises ValueError unless a checkpoint holds the model's trainable parameters: Trainer skips
    what it does not know."""
    with safe_open(os.path.join(checkpoint, WEIGHTS), "pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    wanted = {name: tuple(p.shape) for name, p in trainable(model).items()}
    if found != wanted:
        names = sorted(n for n in found | wanted if found.get(n) != wanted.get(n))
        raise ValueError(
            f"{checkpoint}: not a checkpoint of this model: {names[0]} is {found.get(names[0])}, "
            f"the model's is {wanted.get(names[0])}"
        )


def finished_state(checkpoint: str) -> TrainerState | None:
    """The state of a checkpoint whose run was complete, for which Trainer would do one more step;
    None for others."""
    state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
    return state if state.global_step >= state.max_steps else None


def load_weights(checkpoint: str, model: nn.Module) -> None:
    """Fills the trainable parameters from a checkpoint."""
    model.load_state_dict(load_file(os.path.join(checkpoint, WEIGHTS)), strict=False)


class Schedule(TrainerCallback):
    """Decides when to evaluate and to save, marks complete checkpoints, and reports steps.

    Args:
        trainer: counts the tokens that were seen.
        settings: when to measure, when to save, how many checkpoints to keep.
        progress: receives each step.
        stop: whether to save and stop after this step.
    """

    def __init__(
        self,
        trainer: LoraTrainer,
        settings: Training,
        progress: Progress,
        stop: Callable[[], bool],
    ) -> None:
        self._trainer, self._settings, self._progress, self._stop = (
            trainer,
            settings,
            progress,
            stop,
        )
        self.seconds = 0.0  # of this process's steps

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._progress.begin(state.global_step, state.max_steps)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._begun = time.monotonic()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        training, step = self._settings, state.global_step
        self.seconds += time.monotonic() - self._begun
        last, tenth = step >= state.max_steps, -(-state.max_steps // 10)
        control.should_evaluate = last or step % (training.eval_steps or tenth) == 0
        control.should_save = last or step % (training.save_steps or tenth) == 0
        if self._stop() and not last:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        logs = logs or {}
        if "loss" in logs:
            self._progress.step(state.global_step, logs["loss"], self.rate)
        if "eval_loss" in logs:
            self._progress.held_out(state.global_step, logs["eval_loss"])

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self._trainer.tokens_seen / self.seconds if self.seconds else 0.0

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        folder = str(args.output_dir)
        mark_whole(os.path.join(folder, f"checkpoint-{state.global_step}"))
        remove_old(folder, self._settings.keep_checkpoints)
        self._progress.saved(state.global_step)


def training_arguments(
    settings: Settings, folder: str, on_cpu: bool, resumed: bool
) -> TrainingArguments:
    """Trainer's arguments. `Schedule` decides when to evaluate and to save."""
    training = settings.training
    schedules = {"constant": "constant_with_warmup"}
    return TrainingArguments(
        output_dir=folder,
        num_train_epochs=training.epochs,
        max_steps=training.steps or -1,
        per_device_train_batch_size=training.batch_size,
        gradient_accumulation_steps=training.gradient_accumulation,
        learning_rate=training.learning_rate,
        lr_scheduler_type=schedules.get(training.schedule, training.schedule),
        warmup_steps=training.warmup,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        gradient_checkpointing=training.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        seed=training.seed,
        bf16=settings.model.dtype == "bfloat16",
        use_cpu=on_cpu,
        eval_on_start=not resumed,
        eval_strategy="no",
        save_strategy="no",
        logging_steps=1,
        logging_nan_inf_filter=False,
        dataloader_pin_memory=not on_cpu,
        disable_tqdm=True,
        log_level="error",
        report_to=[],
    )


@contextmanager
def interrupts(told: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Catches the first Ctrl-C, or SIGTERM, inside the block; a second one acts as always.

    told: called with the signal's name. Yields a function that returns whether a signal came.
    """
    caught: list[str] = []

    def handler(number: int, frame: object) -> None:
        for each, previous in before.items():
            signal(each, previous)
        caught.append(Signals(number).name)
        # The main thread may be printing at this moment, and must not do so twice.
        Thread(target=told, args=(caught[0],)).start()

    catches = current_thread() is main_thread()
    before = {number: getsignal(number) for number in (SIGINT, SIGTERM)} if catches else {}
    for number in before:
        signal(number, handler)
    try:
        yield lambda: bool(caught)
    finally:
        for number, previous in before.items():
            signal(number, previous)
