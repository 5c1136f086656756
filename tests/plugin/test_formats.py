"""Both engines on the CPU, all experts cold and read from a checkpoint in each format: what they
say is what transformers says with the dequantised weights.

The served model is BF16; --kt-weight-path names the checkpoint of its experts, one of them as a
repository. --kt-method is left out where the checkpoint tells it. An engine's part is the same for
all formats, so usual tests run all of them in one engine, and some in the other one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_sglang
import test_vllm
import torch
from engines import TIMEOUT, Answers
from expert_weights import HIDDEN, INTERMEDIATE, Weights
from format_files import FORMATS
from grid import FULL
from repositories import keep
from tiny_model import (
    EXPERTS,
    LAYERS,
    TOP_K,
    Reference,
    computed_tokens,
    make,
    spread_prompts,
)

from kt_kernel.weights.methods import get_method

STEPS = 8
PROMPTS = spread_prompts(4, step=7, growth=9)
SOME = ("BF16", "FP8", "AWQ_INT4", "formats by layer and matrix", "Q4_K_M")  # in SGLang
RUNS = {"vllm": list(FORMATS), "sglang": [name for name in FORMATS if FULL or name in SOME]}
CACHED = "FP8"  # the format whose checkpoint is given as a repository
REPOSITORY = "kt-moe/experts"

pytestmark = pytest.mark.timeout(TIMEOUT)


@pytest.fixture(scope="module")
def served(folder: Path) -> Path:
    return make(folder / "model", hidden=HIDDEN, intermediate=INTERMEDIATE)


@pytest.fixture(scope="module")
def written(folder: Path) -> dict[str, tuple[Path, Weights]]:
    """By format: checkpoint and weights."""
    return {name: (folder / name, form.write(folder / name)) for name, form in FORMATS.items()}


def _options(name: str, path: Path) -> dict[str, str]:
    """The kt options of a format; BF16 would not be kept unless it is named."""
    options = {"weight_path": REPOSITORY if name == CACHED else str(path)}
    return options | ({"method": name} if name == "BF16" else {})


def _vllm(folder: Path, cache: str, paths: dict[str, Path], **job: Any) -> Answers:
    runs = [{"name": name, "kt": _options(name, path)} for name, path in paths.items()]
    return test_vllm.run(folder, test_vllm.environment(HF_HUB_CACHE=cache), runs=runs, **job)


def _sglang(folder: Path, cache: str, paths: dict[str, Path], **job: Any) -> Answers:
    runs = [
        {"name": name, "arguments": {f"kt_{key}": value for key, value in options.items()}}
        for name, path in paths.items()
        for options in (_options(name, path),)
    ]
    env = test_sglang.environment(HF_HUB_CACHE=cache)
    return test_sglang.run(folder, env, runs=runs, fork=True, **job)


@pytest.fixture(scope="module")
def answers(
    folder: Path, served: Path, written: dict[str, tuple[Path, Weights]]
) -> Callable[[str], Answers]:
    """Of an engine; it runs when it is first asked for."""
    found: dict[str, Answers] = {}
    cache = folder / "cache"
    keep(cache, REPOSITORY, written[CACHED][0])

    def of(engine: str) -> Answers:
        if os.environ.get(f"KT_{engine.upper()}_PYTHON") is None:
            pytest.skip(f"KT_{engine.upper()}_PYTHON is not set (make test sets it)")
        if engine not in found:
            run = _vllm if engine == "vllm" else _sglang
            paths = {name: written[name][0] for name in RUNS[engine]}
            job = {"model": str(served), "prompts": PROMPTS, "steps": STEPS}
            found[engine] = run(folder / engine, str(cache), paths, **job)
        return found[engine]

    return of


@pytest.fixture(scope="module")
def transformers_model(served: Path) -> Reference:
    return Reference(served)


def _calls(engine: str, answer: dict[str, Any]) -> int:
    if engine == "vllm":
        return sum(layer["expert_calls"] for layer in answer["stats"])
    (counted,) = answer["stats"]["models"]
    return counted["expert_calls"]


def _description(engine: str, answer: dict[str, Any]) -> str:
    if engine == "vllm":
        return answer["describe"][0]
    (counted,) = answer["stats"]["models"]
    return counted["description"]


@pytest.mark.parametrize(
    ("engine", "name"), [(engine, name) for engine, names in RUNS.items() for name in names]
)
def test_logprobs_are_those_of_transformers(
    engine: str,
    name: str,
    answers: Callable[[str], Answers],
    written: dict[str, tuple[Path, Weights]],
    transformers_model: Reference,
) -> None:
    """In float32 but for the activations of the experts: BF16, or int8, which is further off. With
    the served model's own experts, which is the control, the log-probabilities are others."""
    answer = answers(engine)[name]
    assert "error" not in answer, answer
    assert f" {FORMATS[name].method}, " in _description(engine, answer)
    weights = written[name][1]

    def dequantise(layer: int, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        gate, up, wanted_down = weights[layer][expert]
        gate_up.copy_(torch.cat([gate, up]))
        down.copy_(wanted_down)

    found = torch.tensor(answer["logprobs"]).flatten()
    with transformers_model.changed(dequantise, range(EXPERTS)):
        near = (transformers_model.logprobs(PROMPTS, answer["tokens"]) - found).abs()
    far = (transformers_model.logprobs(PROMPTS, answer["tokens"]) - found).abs()
    error = 3 if get_method(FORMATS[name].method).int8_activations else 1
    assert near.median() < 0.005 * error, near.median()
    assert near.mean() < 0.01 * error, near.mean()
    assert far.mean() > 100 / error * near.mean(), (far.mean(), near.mean())
    tokens = computed_tokens(PROMPTS, STEPS)
    assert _calls(engine, answer) >= LAYERS * TOP_K * tokens  # all of them in our kernels
