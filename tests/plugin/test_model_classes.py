"""Every model class on the tested lists, tiny, in the stock engines on the CPU.

Log-probabilities are those of transformers in float32 on the engine's own text, and far from those
of transformers without the cold experts. One process of an engine serves all of its models.
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
from engines import HOT, TIMEOUT, Answers, check_logprobs, check_refused
from family_models import EXPERTS, FAMILIES, PROMPTS, STEPS, FamilyReference, make
from tiny_model import computed_tokens

from kt_kernel.plugin_entrypoints.common import models_tested_in

MODELS = {
    "vllm": [name for name, family in FAMILIES.items() if family.vllm is not None],
    "sglang": [name for name, family in FAMILIES.items() if family.sglang is not None],
}
# And those that are served with a GPU only, see test_gpu_classes.py.
CLASSES = {
    engine: [*names, *(name for name in FAMILIES if engine in FAMILIES[name].gpu)]
    for engine, names in MODELS.items()
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


def _options(hot: int) -> dict[str, Any]:
    return {"method": "BF16", "num_gpu_experts": hot}


def _job(engine: str, models: Callable[[str], Path], folder: Path) -> dict[str, Any]:
    wanted = [run[1:] for run in RUNS if run[0] == engine]
    wanted += [(name, HOT) for of, name in REFUSED if of == engine]
    runs = []
    for name, hot in wanted:
        options = _options(hot)
        one = {"name": f"{name} {hot}", "model": str(models(name))}
        family = FAMILIES[name]
        if engine == "vllm":
            one |= {"kt": options, "engine": family.vllm or {}}
        else:
            one |= {"config": json.dumps(options), "arguments": family.sglang or {}}
        runs.append(one)
    if engine == "vllm":
        for name in BY_TRANSFORMERS:
            one = {"name": f"{name} transformers", "model": str(models(name))}
            engine_options = {"model_impl": "transformers"}
            runs.append(one | {"kt": _options(HOT), "engine": engine_options})
        runs += speculative.runs(folder, models("Qwen2MoeForCausalLM"))
    job = {"model": runs[0]["model"], "prompts": PROMPTS, "steps": STEPS, "runs": runs}
    return job | ({"inspect_here": True} if engine == "vllm" else {"fork": True})


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
    answer, reference, family = answers(engine)[f"{name} {hot}"], references(name), FAMILIES[name]
    check_logprobs(
        f"{engine} {name} {hot} hot", answer, reference, PROMPTS, family.median, family.mean
    )
    stats = answer["stats"]
    calls = sum(layer.get("expert_calls", 0) for layer in _layers(engine, stats))
    tokens = computed_tokens(PROMPTS, STEPS)
    routes = reference.moe_layers * family.top_k * tokens
    if hot == EXPERTS:
        assert calls == 0
    elif hot == 0:
        assert calls >= routes
    else:
        assert calls > routes / 4


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


@pytest.mark.parametrize("engine", CLASSES)
def test_the_list_is_those_classes(engine: str) -> None:
    quantised = {name for of, name in REFUSED if of == engine}
    published = {FAMILIES[name].published or name for name in CLASSES[engine]} | quantised
    name = {"vllm": "vLLM", "sglang": "SGLang"}[engine]
    assert models_tested_in(name) == sorted({"Qwen3MoeForCausalLM", *published})
