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
from class_results import KEPT, MODEL, OTHER_PLACES, RESULTS, classes_that_passed, keep
from engines import (
    HOT,
    TIMEOUT,
    Answers,
    check_logprobs,
    check_refused,
    distances_from_stock,
    logprob_distances,
)
from families_2026 import BFLOAT16, overriding
from families_own import OWN
from family_models import EXPERTS, FAMILIES, PROMPTS, STEPS, FamilyReference, make
from grid import FULL
from lanes import engine_of
from tiny_model import computed_tokens

from kt_kernel.plugin_entrypoints.common import layers_tested_in, models_tested_in

USUAL = (
    "AfmoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "FlexOlmoForCausalLM",
    "Gemma4ForCausalLM",
    "Glm4MoeForCausalLM",
    "GlmMoeDsaForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
    "HYV3ForCausalLM",
    "InternS1ProForConditionalGeneration",
    "InternS2MobiusForConditionalGeneration",
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
# Triton's interpreter takes half a minute for what these compute in SGLang.
INTERPRETED = ("attention_backend", "mamba_radix_cache_strategy")


def _is_usual(engine: str, name: str) -> bool:
    given = FAMILIES[name].on_cpu(engine) or {}
    return name in USUAL and not (engine == "sglang" and any(one in given for one in INTERPRETED))


MODELS = {
    engine: [
        name
        for name, family in FAMILIES.items()
        if family.on_cpu(engine) is not None and (_is_usual(engine, name) or FULL or RESULTS)
    ]
    for engine in ("vllm", "sglang")
}
OWN_MODELS = [name for name in OWN if FULL or RESULTS]
# In it none, some and all experts are hot; in the others some. SGLang starts too slowly for more.
THOROUGH = ("vllm", "DeepseekV3ForCausalLM")
# Also with experts that are read by kt-moe and none hot: the loader of the first one wants a weight
# for each parameter; of the other one, whose first layer is dense, SGLang numbers the layers with
# experts.
READ_HERE = (("sglang", "Grok1ForCausalLM"), ("sglang", "AfmoeForCausalLM"))


def _hot(engine: str, name: str) -> list[int]:
    if engine in FAMILIES[name].cold_only:
        return [0]
    if (engine, name) in READ_HERE:
        return [0, HOT]
    return [0, HOT, EXPERTS] if (engine, name) == THOROUGH else [HOT]


RUNS = [
    (engine, name, hot)
    for engine, names in MODELS.items()
    for name in names
    for hot in _hot(engine, name)
]
# Also served by vLLM with transformers' code for everything but the experts.
BY_TRANSFORMERS = ("Glm4MoeForCausalLM", "MixtralForCausalLM")
# The engines compile their routing, which takes longer than all else. SGLang has some steps as
# kernels of Triton only, which Triton's interpreter runs on the CPU.
VARIABLES = {
    "vllm": {"TORCHDYNAMO_DISABLE": "1"},
    "sglang": {"TORCHDYNAMO_DISABLE": "1", "TRITON_INTERPRET": "1"},
}
# Steps of vllm_stand_ins.py or sglang_stand_ins.py, because the engine has them on GPUs only.
STAND_INS = {
    ("vllm", "DeepseekV32ForCausalLM"): "sparse attention",
    ("vllm", "Ernie4_5_VLMoeForConditionalGeneration"): "rotary embeddings",
    ("vllm", "GlmMoeDsaForCausalLM"): "sparse attention",
    ("vllm", "InternS1ProForConditionalGeneration"): "an attribute",
    ("vllm", "K2HorizonForCausalLM"): "routing",
    ("vllm", "LagunaForCausalLM"): "routing",
    ("vllm", "LongcatFlashForCausalLM"): "routing",
    ("vllm", "MiniMaxM2ForCausalLM"): "routing",
    **{("vllm", name): "experts without a gate" for name in FAMILIES if "NemotronH" in name},
    ("vllm", "OpenPanguVLForConditionalGeneration"): "image encoder",
    ("vllm", "Qwen4ExpForCausalLM"): "residual streams",
    ("vllm", "Qwen4ExpForConditionalGeneration"): "residual streams",
    ("vllm", "Step3p5ForCausalLM"): "routing",
    ("vllm", "Step3p7ForConditionalGeneration"): "image encoder and routing",
    ("sglang", "BailingMMNativeForConditionalGeneration"): "count of weights",
    ("sglang", "BailingMM2NativeForConditionalGeneration"): "count of weights",
    ("sglang", "DeepseekVL2ForCausalLM"): "image encoder",
    ("sglang", "Ernie4_5_VLMoeForConditionalGeneration in SGLang"): "a size in its configuration",
    ("sglang", "GptOssForCausalLM"): "data type",
    ("sglang", "InternS1ProForConditionalGeneration in SGLang"): "rotary embeddings",
    ("sglang", "Llama4ForConditionalGeneration"): "rotary embeddings",
    ("sglang", "MiniMaxM2ForCausalLM"): "norm of queries and keys",
    ("sglang", "MistralLarge3ForCausalLM"): "data type",
    ("sglang", "PixtralForConditionalGeneration"): "data type",
}
# A class that SGLang loads wrongly, whose checkpoints its multimodal class serves.
TEXT_ONLY = "Llama4ForCausalLM"
REFUSED = {
    ("sglang", TEXT_ONLY): "serve the text-only model with --json-model-override-args",
}
AS_MULTIMODAL = BFLOAT16 | overriding(architectures=["Llama4ForConditionalGeneration"])

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


def _options(engine: str, name: str, hot: int, model: Path) -> dict[str, Any]:
    """KT_RESULTS is for classes that are not listed yet, too."""
    options = {"method": "BF16", "num_gpu_experts": hot}
    # The engine is not to make a layer of its own.
    if engine in FAMILIES[name].cold_only or ((engine, name) in READ_HERE and not hot):
        options["weight_path"] = str(model)
    return options | ({"allow_untested": True} if RESULTS else {})


def _job(engine: str, models: Callable[[str], Path], folder: Path) -> dict[str, Any]:
    wanted = [run[1:] for run in RUNS if run[0] == engine]
    wanted += [(name, HOT) for of, name in REFUSED if of == engine]
    runs = []
    for name, hot in wanted:
        options = _options(engine, name, hot, models(name))
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
            kt = _options(engine, name, HOT, models(name))
            runs.append(one | {"kt": kt, "engine": engine_options})
        runs += speculative.runs(folder, models("Qwen2MoeForCausalLM"))
    else:
        one = {"name": f"{TEXT_ONLY} as multimodal", "model": str(models(TEXT_ONLY))}
        config = json.dumps(_options(engine, TEXT_ONLY, HOT, models(TEXT_ONLY)))
        runs.append(one | {"config": config, "arguments": AS_MULTIMODAL})
        runs += [run for name in OWN_MODELS for run in _own_runs(name, folder)]
    job = {"model": runs[0]["model"], "prompts": PROMPTS, "steps": STEPS, "runs": runs}
    if engine == "sglang":
        return job | {"fork": True, "modules": ["sglang_stand_ins"]}
    return job | {"inspect_here": True, "modules": ["vllm_stand_ins"]}


def _own_runs(name: str, folder: Path) -> list[dict[str, Any]]:
    """With kt options, stock, and stock with each expert in the place of another one."""
    config, arguments = OWN[name]
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    options = json.dumps({"method": "BF16", "num_gpu_experts": HOT, "allow_untested": True})
    one = {"model": str(model), "arguments": arguments | {"disable_radix_cache": True}, "moved": 0}
    return [
        one | {"name": f"{name} {HOT}", "config": options},
        one | {"name": f"{name} stock"},
        one | {"name": f"{name} moved", "moved": 1},
    ]


@pytest.fixture(scope="module")
def answers(folder: Path, models: Callable[[str], Path]) -> Callable[[str], Answers]:
    """Of an engine; it runs when it is first asked for."""
    found: dict[str, Answers] = {}

    def of(engine: str) -> Answers:
        # Tests without an engine in their name run in another process, which would serve all again.
        assert engine_of(os.environ["PYTEST_CURRENT_TEST"]) == engine
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
    rounds = "dtype" in (family.on_cpu(engine) or {})  # the whole engine computes in bfloat16
    median, mean = max(family.median, 0.03 * rounds), max(family.mean, 0.06 * rounds)
    assert near.median() < median and near.mean() < mean
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


@pytest.mark.parametrize("name", OWN_MODELS)
def test_sglang_logprobs_of_its_own_classes(name: str, answers: Callable[[str], Answers]) -> None:
    """Those of the prompts' tokens beside the stock engine's, and beside those with experts in
    other places."""
    found = answers("sglang")
    assert "error" not in found[f"{name} {HOT}"], found[f"{name} {HOT}"]
    ours, stock, moved = (
        torch.tensor([value for row in found[f"{name} {kind}"]["prompt"] for value in row])
        for kind in (HOT, "stock", "moved")
    )
    near, far = (ours - stock).abs(), (moved - stock).abs()
    print(f"sglang {name}: median {near.median():.4f} mean {near.mean():.4f} far {far.mean():.3f}")
    assert near.median() < 0.005 and near.mean() < 0.01
    assert far.mean() > 10 * near.mean()
    keep(
        "sglang",
        os.environ["KT_SGLANG_PYTHON"],
        name,
        near,
        far,
        hot=HOT,
        of=EXPERTS,
        control=OTHER_PLACES,
        reference="stock",
    )


if not OWN_MODELS:  # a test without parameters would count as skipped
    del test_sglang_logprobs_of_its_own_classes


def _keep(
    engine: str,
    name: str,
    hot: int,
    near: torch.Tensor,
    far: torch.Tensor,
    found: Answers,
    reference: FamilyReference,
) -> None:
    """Also that the stock engine serves the class as transformers does, or how far off it is, if it
    serves it. Some steps around experts exist on GPUs only, and kt-moe has its own."""
    family, stock = FAMILIES[name], None
    if "error" not in found.get(f"{name} stock", {"error": "not served"}):
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
        stand_in=STAND_INS.get((engine, name)),
    )


def _layers(engine: str, stats: Any) -> list[dict[str, Any]]:
    return stats if engine == "vllm" else stats["models"]


@pytest.mark.parametrize("name", BY_TRANSFORMERS)
def test_vllm_with_models_in_the_code_of_transformers(
    name: str,
    answers: Callable[[str], Answers],
    references: Callable[[str], FamilyReference],
) -> None:
    answer, family = answers("vllm")[f"{name} transformers"], FAMILIES[name]
    check_logprobs(name, answer, references(name), PROMPTS, family.median, family.mean)
    assert answer["hybrid"] == "HybridTransformersRoutedExperts"


def test_sglang_reads_a_text_only_llama_4(
    answers: Callable[[str], Answers], references: Callable[[str], FamilyReference]
) -> None:
    """SGLang serves it as the argument says that its refusal names."""
    answer = answers("sglang")[f"{TEXT_ONLY} as multimodal"]
    check_logprobs(TEXT_ONLY, answer, references(TEXT_ONLY), PROMPTS, 0.03, 0.06)


@pytest.mark.parametrize(("engine", "name"), REFUSED)
def test_refused(engine: str, name: str, answers: Callable[[str], Answers]) -> None:
    check_refused(answers(engine)[f"{name} {HOT}"], REFUSED[engine, name])


@pytest.mark.parametrize(
    "check", [speculative.check_mtp, speculative.check_eagle, speculative.check_ngrams]
)
def test_vllm_decodes_speculatively(
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


@pytest.mark.parametrize("engine", ["vLLM", "SGLang"])
def test_other_spellings_of_listed_classes_are_listed(engine: str) -> None:
    """Registries have some classes under a publisher's and under transformers' spelling."""
    listed = {*models_tested_in(engine), *layers_tested_in(engine)}

    def folded(name: str) -> str:
        return name.lower().replace("_", "")

    known = {folded(name) for name in listed}
    registries = json.loads((KEPT.parent / "registry-classes.json").read_text())
    for version, names in registries.items():
        if version.startswith(engine):
            missing = {name for name in names if folded(name) in known} - listed
            assert not missing, (version, missing)
