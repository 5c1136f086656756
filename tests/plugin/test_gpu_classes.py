"""Every model class on the tested lists, tiny, in the engines on a GPU, in CUDA graphs.

Log-probabilities are as near to those of transformers in float32, on the engine's own text, as the
stock engine's, and far from those of transformers without the cold experts. KT_GPU_CLASSES names
some of the classes, separated by commas; KT_GPU_PROCESSES: how many engines run side by side.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from engines import GPU_SGLANG, GPU_VLLM, HOT, TIMEOUT, check_logprobs, environment, gpu_python
from family_models import FAMILIES, PROMPTS, STEPS, FamilyReference, make
from test_gpu import CPU_THREADS, answers_of
from test_model_classes import MODELS

# Sizes that the engines' kernels take.
SIZES = {"moe_intermediate_size": 128, "intermediate_size": 128}
HEADS = {"head_dim": 128}  # of all but multi-head latent attention
MEDIAN, MEAN = 0.1, 0.4  # a route that rounding turns makes a token's distance up to 4
MLA_BACKEND = {"attention_backend": "TRITON_MLA"}

pytestmark = pytest.mark.timeout(TIMEOUT)


@pytest.mark.parametrize(
    ("engine", "script"), [("vllm", "vllm_run.py"), ("sglang", "sglang_run.py")]
)
def test_classes(folder: Path, engine: str, script: str) -> None:
    python = gpu_python(f"KT_{engine.upper()}_GPU_PYTHON")
    wanted = os.environ.get("KT_GPU_CLASSES")
    names = wanted.split(",") if wanted else MODELS[engine]
    models = {name: _model(name, folder / engine) for name in names}
    kt = {"method": "BF16", "num_gpu_experts": HOT, "cpuinfer": CPU_THREADS}
    runs: list[dict[str, Any]] = []
    for name, path in models.items():
        for ours in (True, False):
            one = {"name": f"{name}{'' if ours else ', stock'}", "model": str(path)}
            if engine == "vllm":
                latent = MLA_BACKEND if _is_latent(name) else {}
                one |= {"kt": kt if ours else None, "compile": True, "engine": GPU_VLLM | latent}
            else:
                one["arguments"] = {f"kt_{key}": value for key, value in kt.items()} if ours else {}
            runs.append(one)
    job = {"model": runs[0]["model"], "dtype": "bfloat16", "prompts": PROMPTS, "steps": STEPS}
    if engine == "sglang":
        job["device"] = GPU_SGLANG
    answers = answers_of(python, script, folder / f"{engine} runs", environment(), runs, job)
    failed = {}
    for name, path in models.items():
        reference = FamilyReference(name, path)
        try:
            mine, stock = (
                check_logprobs(f"{engine} {run}", answers[run], reference, PROMPTS, MEDIAN, MEAN)
                for run in (name, f"{name}, stock")
            )
            assert mine < 2 * stock + 0.05, (mine, stock)
        except AssertionError as error:  # all classes are looked at
            failed[name] = str(error)[-500:]
    assert not failed, failed


def _is_latent(name: str) -> bool:
    return "kv_lora_rank" in FAMILIES[name].config


def _model(name: str, folder: Path) -> Path:
    groups = {"n_group": 1} if name == "Glm4MoeForCausalLM" else {}  # as published
    return make(name, folder / name, **SIZES, **({} if _is_latent(name) else HEADS), **groups)
