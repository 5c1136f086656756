"""A tiny model, texts and settings for `kt sft train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import kt_kernel
from kt_kernel.training.settings import Settings, read_settings

from .models import tiny

DEMO = Path(kt_kernel.__file__).parent / "demo_model"
STEPS = 8


def write_model(folder: Path) -> None:
    """A model with the demo model's tokenizer, which knows bytes."""
    tiny("qwen3_moe", torch.bfloat16, vocab_size=320).save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(folder)


def write_settings(folder: Path, run: str, **sections: dict[str, Any]) -> Path:
    """Writes the settings of a run, and what they name where that is missing."""
    if not (folder / "model").exists():
        write_model(folder / "model")
        (folder / "text.txt").write_text("one two three four five six seven. " * 60)
    given: dict[str, dict[str, Any]] = {
        "model": {
            "path": "model",
            "method": "AMXBF16_SFT",
            "dtype": "float32",
            "device": "cpu",
            "cpuinfer_threads": 2,
        },
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1},
        "data": {"train": "text.txt", "sequence_length": 16, "held_out_fraction": 0.1},
        "training": {
            "steps": STEPS,
            "batch_size": 2,
            "gradient_accumulation": 2,
            "learning_rate": 0.05,
            "save_steps": 3,
            "eval_steps": 4,
            "seed": 5,
        },
        "output": {"folder": run},
    }
    for name, values in sections.items():
        given[name] = {k: v for k, v in (given[name] | values).items() if v is not None}
    lines = []
    for name, values in given.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    path = folder / f"{run}.toml"
    path.write_text("\n".join(lines))
    return path


def settings(folder: Path, run: str, **sections: dict[str, Any]) -> Settings:
    return read_settings(str(write_settings(folder, run, **sections)))
