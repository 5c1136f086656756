"""SGLang on a GPU, in CUDA graphs, with a model whose shared expert it fuses into the routed ones.

Stock, and with all experts hot, it does so; with some cold the plugin keeps it apart, where the
model's layer runs in two ways: as one stream at prefill, as two at decoding.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import GPU_SGLANG, HOT, TIMEOUT, check_logprobs, environment, gpu_python, run
from family_models import EXPERTS, PROMPTS, STEPS, FamilyReference, make
from test_gpu import CPU_THREADS, MEAN

MODEL = "Glm4MoeForCausalLM"
# One group as in published models, and sizes that SGLang's kernels take.
SIZES = {"n_group": 1, "moe_intermediate_size": 128, "intermediate_size": 128, "head_dim": 128}
HOT_EXPERTS = {"stock": None, "some hot": HOT, "none hot": 0, "all hot": EXPERTS}

pytestmark = pytest.mark.timeout(TIMEOUT)


def test_shared_experts(folder: Path) -> None:
    python = gpu_python("KT_SGLANG_GPU_PYTHON")
    path = make(MODEL, folder / "model", seed=1, **SIZES)  # far from ties
    runs = [
        {
            "name": name,
            "arguments": {}
            if hot is None
            else {"kt_method": "BF16", "kt_num_gpu_experts": hot, "kt_cpuinfer": CPU_THREADS},
        }
        for name, hot in HOT_EXPERTS.items()
    ]
    # SGLang compiles its routing of fused experts, which takes longer than all else.
    answers = run(
        python,
        "sglang_run.py",
        folder / "runs",
        environment(TORCHDYNAMO_DISABLE="1"),
        model=str(path),
        dtype="bfloat16",
        device=GPU_SGLANG,
        prompts=PROMPTS,
        steps=STEPS,
        runs=runs,
    )
    reference = FamilyReference(MODEL, path)
    for name, answer in answers.items():
        check_logprobs(name, answer, reference, PROMPTS, median=0.05, mean=MEAN)
        if HOT_EXPERTS[name] in (0, HOT):
            (counted,) = answer["stats"]["models"]
            assert counted["expert_calls"] > 0, counted
    assert answers["all hot"]["logprobs"] == answers["stock"]["logprobs"]
    log = (folder / "runs" / "log").read_text()
    assert "Shared experts fusion optimization is disabled" not in log  # SGLang would fuse them
    assert log.count("kt: --disable-shared-experts-fusion is set") == 2
