"""TRL's SFTTrainer trains wrapped experts as transformers' Trainer does."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from kt_kernel.sft import wrap_experts

from .models import tiny
from .training import DEMO

COMMON = dict(
    max_steps=6,
    per_device_train_batch_size=2,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    seed=3,
    disable_tqdm=True,
    bf16=False,
    gradient_checkpointing=False,
)


def wrapped():
    model = tiny("qwen3_moe", torch.float32, vocab_size=320)
    torch.manual_seed(0)
    wrap_experts(model, lora_rank=4, lora_alpha=8.0, cpuinfer_threads=2)
    return model


def losses(trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_losses_are_those_of_trainer(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    texts = [f"The number {i} is followed by {i + 1}." for i in range(10, 22)]
    arguments = SFTConfig(str(tmp_path / "trl"), max_length=64, router_aux_loss_coef=0.0, **COMMON)
    found = losses(
        SFTTrainer(
            wrapped(),
            arguments,
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=tokenizer,
        )
    )
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    rows = [{"input_ids": torch.tensor(i), "labels": torch.tensor(i)} for i in ids]
    assert len({len(i) for i in ids}) == 1  # no padding, so that the batches are the same
    plain = TrainingArguments(str(tmp_path / "plain"), **COMMON)
    wanted = losses(Trainer(wrapped(), plain, train_dataset=rows))
    # The two compute the same loss in another order, and the experts round to bf16.
    assert found == pytest.approx(wanted, rel=1e-3)
    assert found[-1] < found[0] - 0.5
