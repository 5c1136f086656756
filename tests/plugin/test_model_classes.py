"""Every model class on the tested lists, tiny, in the stock engines on the CPU.

Log-probabilities are those of transformers in float32 on the engine's own text, and far from those
of transformers without the cold experts. One process of an engine serves all of its models.

The usual tests run some of the classes, KT_FULL=1 all. With KT_RESULTS, the stock engine serves
each, too, and the results are kept (see class_results.py).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import speculative
import test_sglang
import test_vllm
import torch
from class_results import MODEL, RESULTS, classes_that_passed, keep
from engines import (
    HOT,
    TIMEOUT,
    Answers,
    check_logprobs,
    check_refused,
    distances_from_stock,
    logprob_distances,
)
from family_models import EXPERTS, FAMILIES, PROMPTS, STEPS, FamilyReference, make
from grid import FULL
from tiny_model import computed_tokens

from kt_kernel.plugin_entrypoints.common import models_tested_in

USUAL = (
    "DeepseekV3ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "FlexOlmoForCausalLM",
    "Gemma4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GraniteMoeForCausalLM",
    "HYV3ForCausalLM",
    "Kimi_K25ForConditionalGeneration",
    "Lfm2MoeForCausalLM",
    "Llama4ForCausalLM",
    "LongcatFlashForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
MODELS = {
    engine: [
        name
        for name, family in FAMILIES.items()
        if family.on_cpu(engine) is not None and (name in USUAL or FULL or RESULTS)
    ]
    for engine in ("vllm", "sglang")
}
# In it none, some and all experts are hot; in the others some. SGLang starts too slowly for more.
THOROUGH = ("vllm", "DeepseekV3ForCausalLM")
RUNS = [
    (engine, name, hot)
    for engine, names in MODELS.items()
    for name in names
    for hot in ([0, HOT, EXPERTS] if (engine, name) == THOROUGH else [HOT])
]
# Also served by vLLM with transformers' code for everything but the experts.
BY_TRANSFORMERS = ("Glm4MoeForCausalLM", "MixtralForCausalLM")
# The engines compile their routing, which takes longer than all else. SGLang has some steps as
# kernels of Triton only, which Triton's interpreter runs on the CPU.
VARIABLES = {
    "vllm": {"TORCHDYNAMO_DISABLE": "1"},
    "sglang": {"TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1"},
}
# Classes that are routed by vllm_stand_ins.py, because vLLM does not route so on the CPU.
STAND_INS = ("LagunaForCausalLM", "LongcatFlashForCausalLM", "MiniMaxM2ForCausalLM")
# On the tested list for its quantised models, see test_quantised_models.py.
REFUSED = {
    ("vllm", "GptOssForCausalLM"): "this model's experts have their own loading; kt-moe serves",
}

pytestmark = pytest.mark.timeout(TIMEOUT)


@pytest.fixture(scope="module")
def models(folder: Path) -> Callable[[str], Path]:
    """Checkpoint of a class, written when it is first asked for."""

    def of(name: str) -> Path:
        path = folder / name
        return path if path.exists() else make(name, path)

    return of


def stocks(engine: str, name: str, hot: int) -> bool:
    """Whether the stock engine serves the model beside this run."""
    return (
        hot == HOT
        and (engine, name) not in REFUSED
        and bool(RESULTS or engine in FAMILIES[name].by_stock)
    )


def _options(hot: int) -> dict[str, Any]:
    """KT_RESULTS is for classes that are not listed yet, too."""
    untested = {"allow_untested": True} if RESULTS else {}
    return {"method": "BF16", "num_gpu_experts": hot, **untested}


def _job(engine: str, models: Callable[[str], Path], folder: Path) -> dict[str, Any]:
    wanted = [run[1:] for run in RUNS if run[0] == engine]
    wanted += [(name, HOT) for of, name in REFUSED if of == engine]
    runs = []
    for name, hot in wanted:
        options = _options(hot)
        given, arguments = {"model": str(models(name))}, FAMILIES[name].on_cpu(engine) or {}
        one = given | {"name": f"{name} {hot}"}
        if engine == "vllm":
            runs.append(one | {"kt": options, "engine": arguments})
        else:
            runs.append(one | {"config": json.dumps(options), "arguments": arguments})
        if stocks(engine, name, hot):
            key = "engine" if engine == "vllm" else "arguments"
            runs.append(given | {"name": f"{name} stock", "kt": None, key: arguments})
    if engine == "vllm":
        for name in BY_TRANSFORMERS:
            one = {"name": f"{name} transformers", "model": str(models(name))}
            engine_options = {"model_impl": "transformers"}
            runs.append(one | {"kt": _options(HOT), "engine": engine_options})
        runs += speculative.runs(folder, models("Qwen2MoeForCausalLM"))
    job = {"model": runs[0]["model"], "prompts": PROMPTS, "steps": STEPS, "runs": runs}
    if engine == "sglang":
        return job | {"fork": True}
    return job | {"inspect_here": True, "modules": ["vllm_stand_ins"]}


@pytest.fixture(scope="module")
def answers(folder: Path, models: Callable[[str], Path]) -> Callable[[str], Answers]:
    """Of an engine; it runs when it is first asked for."""
    found: dict[str, Answers] = {}

    def of(engine: str) -> Answers:
        if os.environ.get(f"KT_{engine.upper()}_PYTHON") is None:
            pytest.skip(f"KT_{engine.upper()}_PYTHON is not set (make test sets it)")
        if engine not in found:
            module = {"vllm": test_vllm, "sglang": test_sglang}[engine]
            env = module.environment(**VARIABLES[engine])
            found[engine] = module.run(folder / engine, env, **_job(engine, models, folder))
        return found[engine]

    return of


@pytest.fixture(scope="module")
def references(models: Callable[[str], Path]) -> Callable[[str], FamilyReference]:
    found: dict[str, FamilyReference] = {}

    def of(name: str) -> FamilyReference:
        return found.get(name) or found.setdefault(name, FamilyReference(name, models(name)))

    return of


@pytest.mark.parametrize(("engine", "name", "hot"), RUNS)
def test_logprobs_are_those_of_transformers(
    engine: str,
    name: str,
    hot: int,
    answers: Callable[[str], Answers],
    references: Callable[[str], FamilyReference],
) -> None:
    """In float32 but for the activations of cold experts, and for what a class says of itself."""
    found, reference, family = answers(engine), references(name), FAMILIES[name]
    answer, title = found[f"{name} {hot}"], f"{engine} {name} {hot} hot"
    if engine in family.by_stock:
        near, far = distances_from_stock(title, found[f"{name} stock"], answer, reference, PROMPTS)
    else:
        near, far = logprob_distances(title, answer, reference, PROMPTS)
    assert near.median() < family.median and near.mean() < family.mean
    assert far.mean() > 10 * near.mean()
    calls = sum(layer.get("expert_calls", 0) for layer in _layers(engine, answer["stats"]))
    tokens = computed_tokens(PROMPTS, STEPS)
    routes = reference.moe_layers * family.top_k * tokens
    if hot == EXPERTS:
        assert calls == 0
    elif hot == 0:
        assert calls >= routes
    else:
        assert calls > routes / 4
    if RESULTS:
        _keep(engine, name, hot, near, far, found, reference)


def _keep(
    engine: str,
    name: str,
    hot: int,
    near: torch.Tensor,
    far: torch.Tensor,
    found: Answers,
    reference: FamilyReference,
) -> None:
    """Also that the stock engine serves the class as transformers does, or how far off it is."""
    family, stock = FAMILIES[name], None
    if f"{name} stock" in found:
        title = f"{engine} {name} stock"
        stock = logprob_distances(title, found[f"{name} stock"], reference, PROMPTS)[0]
    keep(
        engine,
        os.environ[f"KT_{engine.upper()}_PYTHON"],
        family.published or name,
        near,
        far,
        stock,
        hot=hot,
        of=EXPERTS,
        reference="stock" if engine in family.by_stock else "transformers",
        stand_in="routing" if engine == "vllm" and name in STAND_INS else None,
    )


def _layers(engine: str, stats: Any) -> list[dict[str, Any]]:
    return stats if engine == "vllm" else stats["models"]


@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_models_in_the_code_of_transformers(
    name: str,
    answers: Callable[[str], Answers],
    references: Callable[[str], FamilyReference],
) -> None:
    answer, family = answers("vllm")[f"{name} transformers"], FAMILIES[name]
    check_logprobs(name, answer, references(name), PROMPTS, family.median, family.mean)
    assert answer["hybrid"] == "HybridTransformersRoutedExperts"


@pytest.mark.parametrize(("engine", "name"), REFUSED)
def test_refused(engine: str, name: str, answers: Callable[[str], Answers]) -> None:
    check_refused(answers(engine)[f"{name} {HOT}"], REFUSED[engine, name])


@pytest.mark.parametrize(
    "check", [speculative.check_mtp, speculative.check_eagle, speculative.check_ngrams]
)
def test_speculative_decoding(
    check: Callable[[Answers], None], answers: Callable[[str], Answers]
) -> None:
    check(answers("vllm"))


@pytest.mark.parametrize("engine", MODELS)
def test_the_list_is_those_that_passed(engine: str) -> None:
    """Of the kept results, in any version of the engine and on any device."""
    passed = classes_that_passed(engine, MODEL)
    assert models_tested_in({"vllm": "vLLM", "sglang": "SGLang"}[engine]) == passed
    served = {
        family.published or title
        for title, family in FAMILIES.items()
        if family.on_cpu(engine) is not None
    }
    assert served <= {*passed}
