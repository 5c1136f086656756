"""Speculative decoding on a GPU, in CUDA graphs, some experts hot: MTP and n-grams in both engines.

Log-probabilities of the text are near those of transformers in float32, and far from those without
the cold experts. As many tokens of MTP are accepted as in the stock engine; with the draft's
experts in the wrong places, few are.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
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
from family_models import PROMPTS, FamilyReference
from mtp_model import NAME, make_mtp
from speculative import MTP, NGRAM, STEPS
from test_gpu import CPU_THREADS
from test_gpu_classes import HEADS, SIZES

KT = {
    "method": "BF16",
    "num_gpu_experts": HOT,
    "cpuinfer": CPU_THREADS,
    "allow_untested": True,
}
RUNS = {"stock mtp": None, "mtp": KT, "mtp with other experts": KT, "n-grams": KT}
# Graphs for one to three requests with two drafted tokens, and for other numbers.
VLLM_GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 3, 4, 6, 8, 9, 12],
}
SGLANG_GRAPHS = {
    "cuda_graph_max_bs_decode": 4,
    "disable_prefill_cuda_graph": True,
    "disable_radix_cache": True,
}
SGLANG_MTP = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
}
SGLANG_NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}

pytestmark = pytest.mark.timeout(TIMEOUT)


@pytest.fixture(scope="module")
def answers(folder: Path) -> Callable[[str], Answers]:
    @functools.cache
    def of(engine: str) -> Answers:
        python = gpu_python(f"KT_{engine.upper()}_GPU_PYTHON")
        sizes = SIZES | HEADS | {"n_group": 1}
        for name, offset in (("mtp", 0), ("other", 1)):
            if not (folder / name).exists():
                make_mtp(folder / name, offset, **sizes)
        job = {"model": str(folder / "mtp"), "dtype": "bfloat16", "prompts": PROMPTS}
        job |= {"steps": STEPS, "runs": [_run(engine, name, folder) for name in RUNS]}
        if engine == "sglang":
            job["device"] = GPU_SGLANG
        return run(python, f"{engine}_run.py", folder / engine, environment(), **job)

    return of


def _run(engine: str, name: str, folder: Path) -> dict[str, Any]:
    ngrams = name == "n-grams"
    one: dict[str, Any] = {"name": name}
    if name == "mtp with other experts":
        one["model"] = str(folder / "other")
    if engine == "vllm":
        given = GPU_VLLM | {"compilation_config": VLLM_GRAPHS} | (NGRAM if ngrams else MTP)
        return one | {"kt": RUNS[name], "compile": True, "engine": given}
    one["arguments"] = SGLANG_GRAPHS | (SGLANG_NGRAM if ngrams else SGLANG_MTP)
    return one if RUNS[name] is None else one | {"config": json.dumps(RUNS[name])}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("name", RUNS)
def test_the_text_is_right(
    engine: str, name: str, folder: Path, answers: Callable[[str], Answers]
) -> None:
    found = answers(engine)[name]
    reference = FamilyReference(NAME, folder / "mtp")
    near, far = logprob_distances(f"{engine} {name}", found, reference, PROMPTS)
    assert near.median() < 0.06 and far.mean() > 3 * near.mean()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_draft_is_right(engine: str, answers: Callable[[str], Answers]) -> None:
    stock, ours, other = (answers(engine)[name]["accepted"] for name in list(RUNS)[:3])
    print(f"{engine}: accepted tokens: stock {stock}, with cold experts {ours}, control {other}")
    assert ours > 0.8 * stock > 3 * other
