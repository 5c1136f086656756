"""The same training, step by step, as PEFT's on the same model with its experts written out.

PEFT takes most of the time, so usual tests make the first 60 of the 200 steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from grid import examples
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import kt_kernel
from kt_kernel.sft import load_adapter, wrap_experts

from .written_out import write_out

DEMO = Path(kt_kernel.__file__).parent / "demo_model"
STEPS, BATCH, LENGTH, RANK = examples(60, full=200), 2, 48, 4


def demo(dtype: torch.dtype = torch.bfloat16):
    """The first two layers of the demo model."""
    return AutoModelForCausalLM.from_pretrained(
        DEMO, dtype=dtype, num_hidden_layers=2, attn_implementation="eager"
    ).train()


def batches() -> torch.Tensor:
    text = (DEMO / "heldout.txt").read_text()[: STEPS * BATCH * LENGTH * 6]
    ids = AutoTokenizer.from_pretrained(DEMO)(text, return_tensors="pt").input_ids[0]
    return ids[: STEPS * BATCH * LENGTH].view(STEPS, BATCH, LENGTH)


def train(model) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for ids in batches():
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.timeout(900)
def test_losses_are_those_of_peft(tmp_path):
    torch.manual_seed(0)
    config = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules=r".*\.experts\.\d+\.(gate|up|down)_proj"
    )
    peft = get_peft_model(write_out(demo()), config)
    peft.save_pretrained(tmp_path)
    model = demo()
    wrap_experts(model, lora_rank=RANK, lora_alpha=2.0 * RANK, cpuinfer_threads=2)
    load_adapter(model, tmp_path)  # the same first weights

    wanted, found = train(peft), train(model)
    worst = max(abs(a - b) / b for a, b in zip(found, wanted, strict=True))
    assert worst < 1e-2, (wanted, found)
    less = 0.3 if STEPS == 200 else 0.1
    assert sum(wanted[-20:]) < sum(wanted[:20]) - 20 * less  # it learns something
