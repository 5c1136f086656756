"""transformers' Trainer on a tiny model, for some steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from .models import tokens


class Rows(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.ids = tokens(4, 10)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def trainer_of(model: torch.nn.Module, folder: Path, **arguments: Any) -> Trainer:
    given: dict[str, Any] = dict(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_steps=3,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        seed=3,
        disable_tqdm=True,
    )
    return Trainer(model, TrainingArguments(**(given | arguments)), train_dataset=Rows())


def losses(trainer: Trainer) -> list[float]:
    """Of each step."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
