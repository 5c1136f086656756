"""Every model class that an engine serves on a GPU, tiny, in CUDA graphs, some experts hot.

Log-probabilities are as near to those of transformers in float32, on the engine's own text, as the
stock engine's, and nearer than those without the cold experts. KT_GPU_CLASSES names some of the
classes, separated by commas; KT_GPU_PROCESSES: how many processes run side by side. A process of
vLLM serves several classes. KT_GPU_EAGER=1: without graphs, which starts faster.
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
import torch
from class_results import keep
from engines import (
    GPU_SGLANG,
    GPU_VLLM,
    HOT,
    NO_GRAPHS,
    TIMEOUT,
    Answers,
    distances_from_stock,
    environment,
    gpu_python,
    logprob_distances,
    run,
)
from family_models import EXPERTS, FAMILIES, PROMPTS, STEPS, FamilyReference, make
from family_settings import NO_MEDIA
from test_gpu import CPU_THREADS

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
# Of our mean over the stock engine's, each without its largest distance; a row of three without its
# experts makes 0.1.
EXCESS = 0.03
MLA = {"attention_backend": "TRITON_MLA", "attention_config": {"mla_prefill_backend": "CUSTOM"}}
KINDS = ("stock", "ours")
OVERRIDES = ("hf_overrides", "json_model_override_args")
# Decoding alone, and nothing is compiled, so that engines start sooner.
VLLM_GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4],
}
SGLANG_GRAPHS = {"cuda_graph_max_bs_decode": 4, "disable_prefill_cuda_graph": True}
CLASSES = {
    engine: [
        name
        for name, family in FAMILIES.items()
        if family.on_cpu(engine) is not None or engine in family.gpu + family.untried
    ]
    for engine in ("vllm", "sglang")
}
WANTED = os.environ.get("KT_GPU_CLASSES")
PROCESSES = int(os.environ.get("KT_GPU_PROCESSES", "1"))
GRAPHS = os.environ.get("KT_GPU_EAGER", "0") == "0"

pytestmark = pytest.mark.timeout(TIMEOUT)


@pytest.fixture(scope="module")
def answers(folder: Path) -> Callable[[str], dict[str, Answers]]:
    """Of an engine to all wanted classes; it runs when it is first asked for."""

    @functools.cache
    def of(engine: str) -> dict[str, Answers]:
        python = gpu_python(f"KT_{engine.upper()}_GPU_PYTHON")
        names = [name for name in CLASSES[engine] if _wanted(name)]
        for name in names:
            make_for_gpu(name, folder / engine / name)
        # SGLang's process ends with its engine's failures, so it serves one class.
        count = PROCESSES if engine == "vllm" else len(names)
        groups = [names[i::count] for i in range(min(count, len(names)))]
        with ThreadPoolExecutor(PROCESSES) as pool:
            found = pool.map(lambda group: serve(python, engine, group, folder / engine), groups)
            return {name: answers for some in found for name, answers in some.items()}

    return of


@pytest.mark.parametrize(
    ("engine", "name"), [(engine, name) for engine, names in CLASSES.items() for name in names]
)
def test_class(
    engine: str, name: str, folder: Path, answers: Callable[[str], dict[str, Answers]]
) -> None:
    if not _wanted(name):
        pytest.skip(f"not in KT_GPU_CLASSES={WANTED}")
    found = answers(engine)[name]
    judge(engine, name, found, folder / engine / name)


def judge(engine: str, name: str, found: Answers, model: Path) -> None:
    """A route that rounding turns moves a token by up to 4. In the stock engine, it is mostly the
    same one."""
    reference = FamilyReference(name, model)
    family, python = FAMILIES[name], gpu_python(f"KT_{engine.upper()}_GPU_PYTHON")
    near = {}
    for kind in KINDS:
        title = f"{engine} {name}, {kind}"
        near[kind], far = logprob_distances(title, found[kind], reference, PROMPTS)
    spread, by_stock = near["stock"], engine in family.by_stock
    if by_stock:
        title = f"{engine} {name}, from stock"
        near["ours"], far = distances_from_stock(
            title, found["stock"], found["ours"], reference, PROMPTS
        )
        spread = torch.zeros_like(spread)
    assert max(near["ours"].median(), spread.median()) < MEDIAN
    assert far.mean() > 3 * max(near["ours"].mean(), spread.mean())
    ours, stock = (values.sort().values[:-1].mean() for values in (near["ours"], spread))
    assert ours < stock + EXCESS
    keep(
        engine,
        python,
        family.published or name,
        near["ours"],
        far,
        near["stock"],
        hot=HOT,
        of=EXPERTS,
        graphs=GRAPHS,
        reference="stock" if by_stock else "transformers",
    )


def _wanted(name: str) -> bool:
    return WANTED is None or name in WANTED.split(",")


def serve(python: str, engine: str, names: list[str], folder: Path) -> dict[str, Answers]:
    """In one process. Returns the answers of each class by kind; those after a failure of the
    process say so."""
    results = folder / f"{names[0]} runs"
    failure = ""
    try:
        done = run(
            python, f"{engine}_run.py", results, environment(), **job_of(engine, names, folder)
        )
    except AssertionError as error:
        failure, file = str(error), results / "result.json"
        done = {one["name"]: one for one in json.loads(file.read_text())} if file.exists() else {}
    missing = {"error": failure}
    return {name: {kind: done.get(f"{name}, {kind}", missing) for kind in KINDS} for name in names}


def job_of(engine: str, names: list[str], folder: Path) -> dict[str, Any]:
    """Of a process. folder: has a folder for each class."""
    job = {"model": "", "dtype": "bfloat16", "prompts": PROMPTS, "steps": STEPS}
    if engine == "sglang":
        job["device"] = GPU_SGLANG
    else:
        job["inspect_here"] = True
        job["modules"] = ["vllm_torch_prefill"] if any(map(_is_latent, names)) else []
    return job | {"runs": [one for name in names for one in _runs(engine, name, folder / name)]}


def _runs(engine: str, name: str, path: Path) -> list[dict[str, Any]]:
    kt = {"method": "BF16", "num_gpu_experts": HOT, "cpuinfer": CPU_THREADS, "allow_untested": True}
    kt["gpu_prefill_token_threshold"] = 0  # measuring one takes long
    runs = []
    for kind, options in zip(KINDS, (None, kt), strict=True):
        one: dict[str, Any] = {"name": f"{name}, {kind}", "model": str(path)}
        if engine == "vllm":
            one |= {"kt": options, "compile": GRAPHS, "engine": _vllm_arguments(name)}
        else:
            one["arguments"] = (SGLANG_GRAPHS if GRAPHS else NO_GRAPHS) | _overrides(engine, name)
            if FAMILIES[name].inside:
                one["arguments"]["enable_multimodal"] = False
            if options is not None:
                one["config"] = json.dumps(options)
        runs.append(one)
    return runs


def _vllm_arguments(name: str) -> dict[str, Any]:
    found = GPU_VLLM | _overrides("vllm", name)
    if GRAPHS:
        found["compilation_config"] = VLLM_GRAPHS
    if _is_latent(name):
        found |= MLA
    if "linear_num_key_heads" in FAMILIES[name].config:
        found["gdn_prefill_backend"] = "triton"  # the default needs FlashInfer
    if FAMILIES[name].inside:
        found["limit_mm_per_prompt"] = NO_MEDIA
    return found


def _overrides(engine: str, name: str) -> dict[str, Any]:
    """The engine's arguments that change a model's configuration, which do not depend on the
    device."""
    given = FAMILIES[name].on_cpu(engine) or {}
    return {key: given[key] for key in OVERRIDES if key in given}


def _is_latent(name: str) -> bool:
    return "kv_lora_rank" in FAMILIES[name].config


def make_for_gpu(name: str, path: Path) -> None:
    groups = {"n_group": 1} if name == "Glm4MoeForCausalLM" else {}  # as published
    sizes = SIZES | (LATENT_HEADS if _is_latent(name) else HEADS) | groups
    make(name, path, **sizes | FAMILIES[name].wide)
