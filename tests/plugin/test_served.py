"""A quantised model served with little more than its name: what is decided before the workers are
started, by each engine's own front. The engines serve FP8 on GPUs only, see test_native.py."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import test_sglang
import test_vllm
from engines import HERE
from grid import FULL
from quantised_models import make_quantised
from repositories import keep

REPOSITORY = "kt-moe/served"


@pytest.mark.parametrize("engine", ["vllm", "sglang"] if FULL else ["vllm"])
def test_an_fp8_repository(engine: str, tmp_path: Path) -> None:
    """Workers get the method and the folder; neither was given."""
    python = os.environ.get(f"KT_{engine.upper()}_PYTHON")
    if python is None:
        pytest.skip(f"KT_{engine.upper()}_PYTHON is not set (make test sets it)")
    make_quantised(tmp_path / "model", "FP8")
    snapshot = keep(tmp_path / "cache", REPOSITORY, tmp_path / "model")
    environment = (test_vllm if engine == "vllm" else test_sglang).environment
    done = subprocess.run(
        [python, HERE / "served_options.py", engine, REPOSITORY, "--kt-num-gpu-experts", "1"],
        capture_output=True,
        text=True,
        env=environment(HF_HUB_CACHE=str(tmp_path / "cache")),
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "method": "FP8",
        "weight_path": str(snapshot),
        "num_gpu_experts": 1,
        "hot_format": "bf16",  # on the CPU
    }
    log = done.stdout + done.stderr
    assert "kt: method FP8 (auto: FP8 with scales per 128x128 block), hot experts" in log
