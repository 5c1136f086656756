"""kt model check with vLLM on the CPU, for a multimodal class, and for one of vLLM alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import test_vllm
import transformers
from engines import TIMEOUT
from grid import only_full

PYTHON = os.environ.get("KT_VLLM_PYTHON")
CLASS = "Qwen3VLMoeForConditionalGeneration"
# What vLLM reads and transformers does not write by itself.
AS_PUBLISHED = {
    "norm_topk_prob": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5000000.0,
        "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    },
}

pytestmark = [
    pytest.mark.skipif(PYTHON is None, reason="KT_VLLM_PYTHON is not set (make test sets it)"),
    pytest.mark.timeout(TIMEOUT),
]


# Lets the command find that transformers does not know a class.
UNKNOWN = """
from kt_kernel.serving import class_check, small_model

def unknown(config, folder):
    raise small_model.UnknownToTransformers("transformers does not know it")

class_check.write_small_model = unknown
"""


def test_a_class_that_is_safe(tmp_path: Path) -> None:
    config = transformers.Qwen3VLMoeConfig().to_dict() | {"architectures": [CLASS]}
    config["text_config"] |= AS_PUBLISHED
    _check_safe(CLASS, config, tmp_path, 0.02)


@only_full
def test_a_class_that_transformers_does_not_know(tmp_path: Path) -> None:
    """The engine's own class gets the same random weights in all runs."""
    name = "Qwen2MoeForCausalLM"
    config = transformers.Qwen2MoeConfig().to_dict() | {"architectures": [name]}
    said = _check_safe(name, config, tmp_path, 0.03, before=UNKNOWN)
    assert "transformers does not know it; the engine's own class gets random weights" in said


def _check_safe(
    name: str, config: dict[str, Any], folder: Path, near: float, before: str = ""
) -> str:
    """The command's verdict, and its three distances. Returns what it said before.

    near: the most that log-probabilities may differ by. before: code that runs first.
    """
    (folder / "config.json").write_text(json.dumps(config))
    command = (
        f"{before}\nimport sys; from kt_kernel.cli.main import main\nsys.argv[0] = 'kt'; main()"
    )
    done = subprocess.run(
        [PYTHON, "-c", command, "model", "check", str(folder), "--engine", "vllm"],
        capture_output=True,
        text=True,
        env=test_vllm.environment(TORCHDYNAMO_DISABLE="1"),
        timeout=TIMEOUT - 300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.strip().splitlines()
    assert [line.split(":")[1].strip() for line in lines[:3]] == [
        "no hot experts",
        "2 hot experts",
        "experts in the wrong places",
    ]
    found, control = (float(lines[i].rpartition(" ")[2]) for i in (1, 2))
    assert found < near < 0.2 < control
    assert lines[3].startswith(f"kt: {name} in vllm ") and lines[3].endswith("is safe")
    return done.stderr
