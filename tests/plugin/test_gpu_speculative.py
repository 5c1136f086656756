"""Speculative decoding on a GPU, in CUDA graphs, some experts hot, in both engines.

Log-probabilities of the text are near those of transformers in float32, and far from those without
the cold experts. As many tokens of a draft are accepted as in the stock engine; of an MTP layer
with its experts in the wrong places, few are. KT_GPU_PROCESSES: how many engines run side by side.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_model
from eagle_model import METHODS, make_draft
from engines import (
    GPU_SGLANG,
    GPU_VLLM,
    HERE,
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
from speculative import MTP, NGRAM, STEPS, eagle
from test_gpu import CPU_THREADS
from test_gpu_classes import HEADS, SIZES

KT = {
    "method": "BF16",
    "num_gpu_experts": HOT,
    "cpuinfer": CPU_THREADS,
    "gpu_prefill_token_threshold": 0,  # measuring one takes long
    "allow_untested": True,
}
# The runs of each method. Each method has a process: SGLang's ends with an engine that fails.
RUNS = {
    "mtp": {"stock mtp": None, "mtp": KT, "mtp with other experts": KT},
    "n-grams": {"n-grams": KT},
    "eagle": {"stock eagle": None, "eagle": KT},
    "eagle3": {"stock eagle3": None, "eagle3": KT},
}
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
SGLANG_DRAFT = {
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
}
SGLANG_NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}

pytestmark = pytest.mark.timeout(TIMEOUT)


class Served(NamedTuple):
    """The model of a method's runs, written to a new folder."""

    model: Path
    other: Path | None  # the control: the same with other experts in its draft
    reference: tiny_model.Reference
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def served(folder: Path) -> Callable[[str], Served]:
    @functools.cache
    def of(method: str) -> Served:
        path = folder / ("eagle" if method in METHODS else "mtp")
        if method in METHODS:
            if not path.exists():
                tiny_model.make(path, hidden=512, intermediate=128, head_dim=128)
            reference = tiny_model.Reference(path)
            prompts = tiny_model.clear_prompts(reference, count=3, tries=24)
            return Served(path, None, reference, prompts)
        sizes, other = SIZES | HEADS | {"n_group": 1}, folder / "other"
        for file, offset in ((path, 0), (other, 1)):
            if not file.exists():
                make_mtp(file, offset, **sizes)
        return Served(path, other, FamilyReference(NAME, path), PROMPTS)

    return of


@pytest.fixture(scope="module")
def answers(folder: Path, served: Callable[[str], Served]) -> Callable[[str], Answers]:
    @functools.cache
    def of(engine: str) -> Answers:
        python = gpu_python(f"KT_{engine.upper()}_GPU_PYTHON")
        jobs = {method: _job(engine, method, served(method), folder) for method in RUNS}

        def serve(method: str) -> Answers:
            place = folder / f"{engine} {method}"
            try:
                return run(python, f"{engine}_run.py", place, _environment(engine), **jobs[method])
            except AssertionError as error:
                failed = {name: {"error": str(error)} for name in RUNS[method]}
                file = place / "result.json"
                done = json.loads(file.read_text()) if file.exists() else []
                return failed | {answer["name"]: answer for answer in done}

        with ThreadPoolExecutor(int(os.environ.get("KT_GPU_PROCESSES", "1"))) as pool:
            found = pool.map(serve, jobs)
            return {name: answer for answers in found for name, answer in answers.items()}

    return of


def _environment(engine: str) -> dict[str, str]:
    if engine == "vllm" or importlib.util.find_spec("deep_gemm"):
        return environment()
    path = [str(HERE / "deep_gemm_standin"), os.environ.get("PYTHONPATH", "")]
    return environment(
        PYTHONPATH=os.pathsep.join(filter(None, path)), SGLANG_ENABLE_JIT_DEEPGEMM="false"
    )


def _job(engine: str, method: str, served: Served, folder: Path) -> dict[str, Any]:
    job = {"model": str(served.model), "dtype": "bfloat16", "prompts": served.prompts}
    job |= {"steps": STEPS, "runs": []}
    settings = _settings(engine, method, served, folder)
    for name, options in RUNS[method].items():
        one: dict[str, Any] = {"name": name}
        if name == "mtp with other experts":
            one["model"] = str(served.other)
        if engine == "vllm":
            given = GPU_VLLM | {"compilation_config": VLLM_GRAPHS} | settings
            one |= {"kt": options, "compile": True, "engine": given}
        else:
            one["arguments"] = SGLANG_GRAPHS | settings
            one |= {} if options is None else {"config": json.dumps(options)}
        job["runs"].append(one)
    return job | ({"device": GPU_SGLANG} if engine == "sglang" else {})


def _settings(engine: str, method: str, served: Served, folder: Path) -> dict[str, Any]:
    """The engine's arguments for a method. Writes its draft."""
    if method == "n-grams":
        return NGRAM if engine == "vllm" else SGLANG_NGRAM
    if method == "mtp":
        return MTP if engine == "vllm" else SGLANG_DRAFT | {"speculative_algorithm": "EAGLE"}
    draft = folder / f"{engine} {method} draft"
    make_draft(draft, engine, method, served.reference, served.prompts, STEPS)
    if engine == "vllm":
        settings = eagle(method, draft)
        # vLLM selects a backend for the draft by itself.
        settings["speculative_config"]["attention_backend"] = GPU_VLLM["attention_backend"]
        return settings
    return SGLANG_DRAFT | {
        "speculative_algorithm": method.upper(),
        "speculative_draft_model_path": str(draft),
    }


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("method", "name"), [(method, name) for method, names in RUNS.items() for name in names]
)
def test_the_text_is_right(
    engine: str,
    method: str,
    name: str,
    served: Callable[[str], Served],
    answers: Callable[[str], Answers],
) -> None:
    found, model = answers(engine)[name], served(method)
    near, far = logprob_distances(f"{engine} {name}", found, model.reference, model.prompts)
    assert near.median() < 0.06 and far.mean() > 3 * near.mean()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("method", [method for method in RUNS if method != "n-grams"])
def test_the_draft_is_right(engine: str, method: str, answers: Callable[[str], Answers]) -> None:
    """The draft's experts, and the hidden states that it reads."""
    found = {name: answers(engine)[name].get("accepted") for name in RUNS[method]}
    print(f"{engine}: accepted tokens: {found}")
    stock, ours = found[f"stock {method}"], found[method]
    assert stock is not None and ours > 0.8 * stock > 3
    if method == "mtp":
        assert stock > 3 * found["mtp with other experts"]
