"""transformers' Trainer: accumulation, clipping, checkpointing, bf16 autocast, resuming."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer

from kt_kernel.sft import wrap_experts
from kt_kernel.sft.wrap import wrapped_experts

from .models import tiny
from .trainers import losses, trainer_of

SETTINGS = dict(lora_rank=4, lora_alpha=8.0, cpuinfer_threads=2, lora_dropout=0.1)


def make_trainer(folder, *, peft: bool = False, **arguments) -> Trainer:
    torch.manual_seed(0)
    model = tiny("qwen3_moe", torch.float32)
    if peft:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    torch.manual_seed(0)
    wrap_experts(model, **SETTINGS)
    given = dict(learning_rate=3e-2, gradient_accumulation_steps=2, max_grad_norm=0.5)
    return trainer_of(model, folder, **(given | arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"bf16": True},
        {"gradient_checkpointing": True},
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        },
    ],
    ids=["plain", "bf16", "checkpointing", "reentrant"],
)
def test_trains(tmp_path, arguments):
    trainer = make_trainer(tmp_path, **arguments)
    if "gradient_checkpointing_kwargs" in arguments:
        trainer.model.enable_input_require_grads()
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    found = losses(trainer)
    assert len(found) == 6 and sum(found[-2:]) < sum(found[:2])
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, before[name]) != ("lora_" in name), name
    modules = wrapped_experts(trainer.model).values()
    assert [m.wrapper.pending for m in modules] == [0, 0]


def test_checkpointing_changes_nothing(tmp_path):
    found = []
    for checkpointing in (False, True):
        trainer = make_trainer(tmp_path, gradient_checkpointing=checkpointing)
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == found[1]


@pytest.mark.parametrize("peft", [False, True], ids=["whole", "peft"])
def test_resuming_gives_the_same_losses(tmp_path, peft):
    whole = make_trainer(tmp_path / "whole", peft=peft)
    whole.train()
    again = make_trainer(tmp_path / "again", peft=peft)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses(again) == losses(whole)
    assert len(set(losses(whole))) == 6
