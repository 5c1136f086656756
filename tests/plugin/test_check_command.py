"""kt model check with vLLM on the CPU, for a multimodal class."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import test_vllm
import transformers
from engines import TIMEOUT

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


def test_a_class_that_is_safe(tmp_path: Path) -> None:
    config = transformers.Qwen3VLMoeConfig().to_dict() | {"architectures": [CLASS]}
    config["text_config"] |= AS_PUBLISHED
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = "import sys; from kt_kernel.cli.main import main; sys.argv[0] = 'kt'; main()"
    done = subprocess.run(
        [PYTHON, "-c", command, "model", "check", str(tmp_path), "--engine", "vllm"],
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
    near, control = (float(lines[i].rpartition(" ")[2]) for i in (1, 2))
    assert near < 0.02 < 0.2 < control
    assert lines[3].startswith(f"kt: {CLASS} in vllm ") and lines[3].endswith("is safe")
