"""An adapter of experts served on a GPU, with hot experts in the engine's kernels and cold ones in
ours, beside the stock engine with the adapter merged into its checkpoint.

KT_VLLM_GPU_PYTHON and KT_SGLANG_GPU_PYTHON name pythons with engines for CUDA, and this package.
KT_GPU_RUNS names some of the runs, separated by semicolons.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    GPU_SGLANG,
    GPU_VLLM,
    HOT,
    NO_GRAPHS,
    SGLANG_COUNTED,
    TIMEOUT,
    Answers,
    check_logprobs,
    environment,
    gpu_python,
    logprob_distances,
    run,
)
from lora_files import write
from test_gpu import CPU_THREADS, MEAN
from tiny_model import EXPERTS, LAYERS, Reference, make, spread_prompts
from trained_adapter import adapted

SIZE = 128
STEPS = 16
PROMPTS = spread_prompts(6)
STOCK = "stock, merged"
#: Hot experts, and whether the engine captures graphs.
RUNS = {
    "some hot": (HOT, False),
    "none hot": (0, False),
    "all hot": (EXPERTS, False),
    "some hot, graphs": (HOT, True),
}
MEDIAN = 0.05

pytestmark = pytest.mark.timeout(TIMEOUT)


@dataclass
class Adapted:
    """model: without the adapter, merged: with it in its weights, both in BF16. reference:
    transformers with the adapter; plain: without."""

    model: Path
    adapter: Path
    merged: Path
    reference: Reference
    plain: Reference


@pytest.fixture(scope="module")
def made(folder: Path) -> Iterator[Adapted]:
    model = make(folder / "model", hidden=SIZE, intermediate=SIZE, head_dim=64)
    adapter, merged = folder / "adapter", folder / "merged"
    deltas = write(
        adapter, experts=EXPERTS, hidden=SIZE, inter=SIZE, layers=range(LAYERS), size=0.1
    )
    reference = Reference(model)
    with adapted(reference, deltas):
        copy.deepcopy(reference.model).bfloat16().save_pretrained(merged)
        yield Adapted(model, adapter, merged, reference, Reference(model))


def _runs(made: Adapted) -> list[tuple[dict[str, Any], dict[str, Any], bool]]:
    """Name and model of each run, its kt options, and whether it captures graphs."""
    runs: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
        ({"name": STOCK, "model": str(made.merged)}, {}, False)
    ]
    for name, (hot, graphs) in RUNS.items():
        kt = {
            "method": "BF16",
            "num_gpu_experts": hot,
            "cpuinfer": CPU_THREADS,
            "expert_lora_path": str(made.adapter),
        }
        runs.append(({"name": name}, kt, graphs))
    names = os.environ.get("KT_GPU_RUNS", ";".join([STOCK, *RUNS])).split(";")
    return [run for run in runs if run[0]["name"] in names]


def _job(made: Adapted) -> dict[str, Any]:
    return {"model": str(made.model), "dtype": "bfloat16", "prompts": PROMPTS, "steps": STEPS}


def _check(engine: str, answers: Answers, log: str, made: Adapted) -> None:
    """Near to transformers with the adapter, and far from it without."""
    for name, answer in answers.items():
        title = f"{engine} {name}"
        near = check_logprobs(title, answer, made.reference, PROMPTS, MEDIAN, MEAN)
        without, _ = logprob_distances(f"{title}, no adapter", answer, made.plain, PROMPTS)
        assert without.mean() > 10 * near, name
    # The same kernels with the same weights, up to ties in their rounding to BF16.
    if {"all hot", STOCK} <= answers.keys():
        ours, stock = (torch.tensor(answers[name]["logprobs"]) for name in ("all hot", STOCK))
        assert (ours - stock).abs().median() < 1e-3
    merged = f"adapter {made.adapter} merged into layers 0-{LAYERS - 1}"
    assert log.count(merged) >= len(answers.keys() & RUNS.keys()) > 0


def test_vllm(folder: Path, made: Adapted) -> None:
    python = gpu_python("KT_VLLM_GPU_PYTHON")
    runs = [
        {**one, "engine": GPU_VLLM, "kt": kt or None, "compile": graphs}
        for one, kt, graphs in _runs(made)
    ]
    answers = run(python, "vllm_run.py", folder / "vllm", environment(), **_job(made), runs=runs)
    _check("vLLM", answers, (folder / "vllm" / "log").read_text(), made)


def test_sglang(folder: Path, made: Adapted) -> None:
    python = gpu_python("KT_SGLANG_GPU_PYTHON")
    runs = [
        {
            **one,
            "config": json.dumps(kt) if kt else "",
            "arguments": {} if graphs else NO_GRAPHS,
        }
        for one, kt, graphs in _runs(made)
    ]
    job = _job(made) | {"device": GPU_SGLANG | SGLANG_COUNTED}
    answers = run(python, "sglang_run.py", folder / "sglang", environment(), **job, runs=runs)
    _check("SGLang", answers, (folder / "sglang" / "log").read_text(), made)
