"""Every model class that an engine serves on a GPU, tiny, in CUDA graphs, some experts hot.

Log-probabilities are as near to those of transformers in float32, on the engine's own text, as the
stock engine's, and nearer than those without the cold experts. KT_GPU_CLASSES names
some of the classes, separated by commas; KT_GPU_PROCESSES: how many engines run side by side.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import (
    GPU_SGLANG,
    GPU_VLLM,
    HOT,
    TIMEOUT,
    Answers,
    environment,
    gpu_python,
    logprob_distances,
    run,
)
from family_models import FAMILIES, PROMPTS, STEPS, FamilyReference, make
from test_gpu import CPU_THREADS
from test_model_classes import CLASSES as TESTED

# Sizes that the engines' kernels take, the same for engines that go by head_dim and those that go
# by hidden_size / num_attention_heads.
SIZES = {
    "hidden_size": 512,
    "moe_intermediate_size": 128,
    "intermediate_size": 128,
    "initializer_range": 0.075,
}
HEADS = {"head_dim": 128}
LATENT_HEADS = {"qk_nope_head_dim": 128, "v_head_dim": 128}
MEDIAN = 0.06  # that of bfloat16 in transformers is up to 0.034
EXCESS = 0.03  # of our mean over the stock engine's; a row of three without its experts makes 0.1
MLA = {"attention_backend": "TRITON_MLA", "attention_config": {"mla_prefill_backend": "CUSTOM"}}
KINDS = ("stock", "ours")
CLASSES = {
    engine: [*names, *(name for name in FAMILIES if engine in FAMILIES[name].untried)]
    for engine, names in TESTED.items()
}
# What the stock engine lacks on a machine without it.
LACKS = {("vllm", "Qwen3NextForCausalLM"): "No module named 'flashinfer'"}
WANTED = os.environ.get("KT_GPU_CLASSES")

pytestmark = pytest.mark.timeout(TIMEOUT)


@pytest.fixture(scope="module")
def answers(folder: Path) -> Callable[[str], dict[str, Answers]]:
    """Of an engine to all wanted classes; it runs when it is first asked for."""

    @functools.cache
    def of(engine: str) -> dict[str, Answers]:
        python = gpu_python(f"KT_{engine.upper()}_GPU_PYTHON")
        names = [name for name in CLASSES[engine] if _wanted(name)]
        for name in names:
            _make(name, folder / engine / name)
        with ThreadPoolExecutor(int(os.environ.get("KT_GPU_PROCESSES", "1"))) as pool:
            found = pool.map(lambda name: _run(python, engine, name, folder / engine), names)
            return dict(zip(names, found, strict=True))

    return of


@pytest.mark.parametrize(
    ("engine", "name"), [(engine, name) for engine, names in CLASSES.items() for name in names]
)
def test_class(
    engine: str, name: str, folder: Path, answers: Callable[[str], dict[str, Answers]]
) -> None:
    """A route that rounding turns moves a token by up to 4, in the stock engine mostly the same."""
    if not _wanted(name):
        pytest.skip(f"not in KT_GPU_CLASSES={WANTED}")
    found = answers(engine)[name]
    lacks = LACKS.get((engine, name))
    if lacks and lacks in found["stock"].get("error", ""):
        pytest.skip(f"the stock engine does not serve it here: {lacks}")
    reference = FamilyReference(name, folder / engine / name)
    near = {}
    for kind in KINDS:
        title = f"{engine} {name}, {kind}"
        near[kind], far = logprob_distances(title, found[kind], reference, PROMPTS)
        assert near[kind].median() < MEDIAN
        assert far.mean() > 3 * near[kind].mean()
    assert near["ours"].mean() < near["stock"].mean() + EXCESS


def _wanted(name: str) -> bool:
    return WANTED is None or name in WANTED.split(",")


def _run(python: str, engine: str, name: str, folder: Path) -> Answers:
    """In a process for each class: SGLang's ends with its engine's failures."""
    results = folder / f"{name} runs"
    try:
        job = _job(engine, name, folder / name)
        return run(python, f"{engine}_run.py", results, environment(), **job)
    except AssertionError as error:
        failed = {kind: {"error": str(error)} for kind in KINDS}
        file = results / "result.json"
        done = json.loads(file.read_text()) if file.exists() else []
        return failed | {answer["name"]: answer for answer in done}


def _job(engine: str, name: str, path: Path) -> dict[str, Any]:
    kt = {"method": "BF16", "num_gpu_experts": HOT, "cpuinfer": CPU_THREADS}
    job = {"model": str(path), "dtype": "bfloat16", "prompts": PROMPTS, "steps": STEPS}
    if engine == "sglang":
        return job | {
            "device": GPU_SGLANG,
            "runs": [{"name": "stock"}, {"name": "ours", "config": json.dumps(kt)}],
        }
    latent = _is_latent(name)
    return job | {
        "modules": ["vllm_torch_prefill"] if latent else [],
        "runs": [
            {
                "name": kind,
                "kt": options,
                "compile": True,
                "engine": GPU_VLLM | (MLA if latent else {}),
            }
            for kind, options in zip(KINDS, (None, kt), strict=True)
        ],
    }


def _is_latent(name: str) -> bool:
    return "kv_lora_rank" in FAMILIES[name].config


def _make(name: str, path: Path) -> None:
    groups = {"n_group": 1} if name == "Glm4MoeForCausalLM" else {}  # as published
    make(name, path, **SIZES, **(LATENT_HEADS if _is_latent(name) else HEADS), **groups)
