"""vLLM on a GPU in float16, with an expert that overflows among the hot ones: its kernels must not
compute cold routes with it. The smallest batches and larger ones take different ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import GPU_VLLM, TIMEOUT, check_equal, environment, gpu_python, run
from overflow import HOT, overflowing
from tiny_model import GAP, STEPS

pytestmark = pytest.mark.timeout(TIMEOUT)


def test_overflow_stays_with_its_tokens(folder: Path) -> None:
    python = gpu_python("KT_VLLM_GPU_PYTHON")
    made = overflowing(folder)
    one = {
        "kt": {"method": "BF16", "num_gpu_experts": HOT},
        "engine": GPU_VLLM | {"dtype": "float16"},
    }
    runs = [
        {"name": "graphs", "compile": True, **one},
        {"name": "eager", **one},
        {"name": "one at a time", **one, "engine": one["engine"] | {"max_num_seqs": 1}},
    ]
    job = {"model": str(made.path), "prompts": made.prompts, "steps": STEPS, "runs": runs}
    answers = run(python, "vllm_run.py", folder / "float16", environment(), **job)
    for answer in answers.values():
        check_equal(made.greedy, answer, gap=5 * GAP)
