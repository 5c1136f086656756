"""Speculative decoding on a GPU, in CUDA graphs, some experts hot, in both engines.

Log-probabilities of the text are near those of transformers in float32, and far from those without
the cold experts. As many tokens of a draft are accepted as in the stock engine; of an MTP layer
with its experts in the wrong places, few are, and of a draft that is always wrong, none. How much
of the text is that without speculation is printed. KT_GPU_PROCESSES: how many engines run side by
side.
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
}
# The runs of each method. Each method has a process: SGLang's ends with an engine that fails.
RUNS = {
    "mtp": {"stock mtp": None, "mtp": KT, "mtp with other experts": KT},
    "n-grams": {"without n-grams": KT, "n-grams": KT, "stock n-grams": None},
    "eagle": {"stock eagle": None, "eagle": KT, "eagle that is wrong": KT, "without eagle": KT},
    "eagle3": {"stock eagle3": None, "eagle3": KT, "eagle3 that is wrong": KT},
}
PLAIN = {
    "mtp": "without n-grams",
    "n-grams": "without n-grams",
    "eagle": "without eagle",
    "eagle3": "without eagle",
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
SGLANG_NGRAM = {
    "speculative_algorithm": "NGRAM",
    "speculative_num_draft_tokens": 4,
    "speculative_ngram_max_bfs_breadth": 1,
}
# SGLang 0.5.17 compiles its n-grams with it, whose sources miss this header with g++ 12.
COMPILER = "c++ -include cstddef"

pytestmark = pytest.mark.timeout(TIMEOUT)


class Served(NamedTuple):
    """The model of a method's runs, written to a new folder."""

    model: Path
    other: Path | None  # the control of MTP: the same with other experts in its draft
    reference: tiny_model.Reference
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def served(folder: Path) -> Callable[[str], Served]:
    return functools.cache(lambda method: make_served(method, folder))


def make_served(method: str, folder: Path) -> Served:
    """Writes the model, unless another method has it."""
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


@pytest.fixture(scope="module")
def answers(folder: Path, served: Callable[[str], Served]) -> Callable[[str], Answers]:
    @functools.cache
    def of(engine: str) -> Answers:
        python = gpu_python(f"KT_{engine.upper()}_GPU_PYTHON")
        jobs = {method: make_job(engine, method, served(method), folder) for method in RUNS}

        def serve(method: str) -> Answers:
            place = folder / f"{engine} {method}"
            try:
                return run(
                    python, f"{engine}_run.py", place, engine_environment(engine), **jobs[method]
                )
            except AssertionError as error:
                failed = {name: {"error": str(error)} for name in RUNS[method]}
                file = place / "result.json"
                done = json.loads(file.read_text()) if file.exists() else []
                return failed | {answer["name"]: answer for answer in done}

        with ThreadPoolExecutor(int(os.environ.get("KT_GPU_PROCESSES", "1"))) as pool:
            found = pool.map(serve, jobs)
            return {name: answer for answers in found for name, answer in answers.items()}

    return of


def engine_environment(engine: str) -> dict[str, str]:
    if engine == "vllm":
        return environment()
    more = {"CXX": COMPILER}
    if not importlib.util.find_spec("deep_gemm"):
        path = [str(HERE / "deep_gemm_standin"), os.environ.get("PYTHONPATH", "")]
        more["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        more["SGLANG_ENABLE_JIT_DEEPGEMM"] = "false"
    return environment(**more)


def make_job(engine: str, method: str, served: Served, folder: Path) -> dict[str, Any]:
    """Also writes the method's drafts."""
    job = {"model": str(served.model), "dtype": "bfloat16", "prompts": served.prompts}
    job |= {"steps": STEPS, "runs": []}
    for name, options in RUNS[method].items():
        one: dict[str, Any] = {"name": name}
        if name == "mtp with other experts":
            one["model"] = str(served.other)
        settings = {}
        if name not in PLAIN.values():
            settings = _settings(engine, method, name, served, folder)
        if engine == "vllm":
            given = GPU_VLLM | {"compilation_config": VLLM_GRAPHS} | settings
            one |= {"kt": options, "compile": True, "engine": given}
        else:
            one["arguments"] = SGLANG_GRAPHS | settings
            one |= {} if options is None else {"config": json.dumps(options)}
        job["runs"].append(one)
    return job | ({"device": GPU_SGLANG} if engine == "sglang" else {})


def _settings(engine: str, method: str, name: str, served: Served, folder: Path) -> dict[str, Any]:
    """The engine's arguments for a run. Writes its draft."""
    if method == "n-grams":
        return NGRAM | {"disable_log_stats": False} if engine == "vllm" else SGLANG_NGRAM
    if method == "mtp":
        return MTP if engine == "vllm" else SGLANG_DRAFT | {"speculative_algorithm": "EAGLE"}
    shift = int("wrong" in name)
    draft = folder / f"{engine} {method} draft {shift}"
    if not draft.exists():
        make_draft(draft, engine, method, served.reference, served.prompts, STEPS, shift)
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
    check_text(engine, name, answers(engine), served(method))


def check_text(engine: str, name: str, answers: Answers, served: Served) -> None:
    """Of a run."""
    near, far = logprob_distances(
        f"{engine} {name}", answers[name], served.reference, served.prompts
    )
    assert near.median() < 0.06 and far.mean() > 3 * near.mean()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("method", RUNS)
def test_the_draft_is_right(
    engine: str,
    method: str,
    served: Callable[[str], Served],
    answers: Callable[[str], Answers],
) -> None:
    check_draft(engine, method, answers(engine), served(method))


def check_draft(engine: str, method: str, answers: Answers, served: Served) -> None:
    """The draft's experts, and the hidden states that it reads. Rounding may decide between two
    tokens, so that a text differs from there on. A draft that was fitted to a text predicts nothing
    after that."""
    plain = answers[PLAIN[method]]["tokens"]
    print(f"{engine} {method}: tokens as without speculation: {_common(answers[method], plain)}")
    found = {name: answers[name].get("accepted") for name in RUNS[method]}
    print(f"{engine}: accepted tokens: {found}")
    stock, ours = found[f"stock {method}"], found[method]
    assert stock is not None and min(stock, ours) > 3
    if method in METHODS:
        fitted = served.reference.greedy(served.prompts, STEPS).tokens
        stock, ours = (
            found[name] / _common(answers[name], fitted) for name in (f"stock {method}", method)
        )
        assert found[f"{method} that is wrong"] < 0.1 * found[method]
    assert ours > 0.8 * stock
    if method == "mtp":
        assert stock > 3 * found["mtp with other experts"]


def _common(answer: dict[str, Any], texts: list[list[int]]) -> int:
    """Tokens before the first difference, of all texts together."""
    return sum(
        next((i for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), STEPS)
        for pair in zip(answer["tokens"], texts, strict=True)
    )
