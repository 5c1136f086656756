"""MoE layers alone, of classes that an engine does not serve on the CPU: the engine's own modules
with gate, routing, shared and routed experts, on random inputs.

Their outputs are those of transformers' modules in float32, and far from those without the cold
experts. One process of an engine loads all of its models.

The usual tests run some of the classes, KT_FULL=1 all. With KT_RESULTS, the stock engine computes
each, too, and the results are kept (see class_results.py).
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import test_sglang
import test_vllm
import torch
from class_results import MOE_LAYER, RESULTS, classes_that_passed, keep
from engines import HOT, TIMEOUT, Answers, run
from families_2026 import BFLOAT16, overriding
from family_models import EXPERTS, FAMILIES, FamilyReference, make
from family_settings import COMMON, NO_MEDIA, VOCABULARY
from grid import FULL
from moe_layers_run import rank_outputs
from safetensors.torch import load_file, save_file

from kt_kernel.plugin_entrypoints.common import layers_tested_in


@dataclass(frozen=True)
class Alone:
    """usual: whether the usual tests run it. arguments: of the engine. changed: settings of the
    model. hot: experts; none where the engine's kernels for the CPU cannot compute any. written:
    settings in config.json alone, for parts that are not computed. near: how far a token's output
    may be from the reference's, relative to it; rounding inputs to bfloat16 gives up to 0.002.
    stock: whether the stock engine computes the layers on the CPU."""

    usual: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, Any] = field(default_factory=dict)
    hot: int = HOT
    written: dict[str, Any] = field(default_factory=dict)
    near: float = 0.005


# transformers' configuration of a text-only MiniMax-M3 has another activation.
SWIGLUOAI = {
    "hf_overrides": dict(hidden_act="swigluoai", rope_theta=5e6, partial_rotary_factor=0.5)
}
LINEAR = {"mamba_radix_cache_strategy": "no_buffer", "disable_overlap_schedule": True}
# Sparse attention wants pages that SGLang's cache of prefixes does not have here.
PAGED = LINEAR | {"disable_radix_cache": True, "enable_multimodal": False}
# SGLang leaves this factor to its kernels for GPUs.
UNSCALED = {"routed_scaling_factor": 1.0}
# SGLang's code for the CPU knows no attention of DeepSeek-V4 without these.
COMPRESSED = {
    "compress_ratios": [4, 128],
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
# vLLM has none for MLA on the CPU, and refuses to switch it off by itself beside linear attention.
UNCACHED = {"enable_prefix_caching": False}
# SGLang's kernels for the CPU compute no hot experts of classes whose SwiGLU has a limit.
CLASSES: dict[str, dict[str, Alone]] = {
    "vllm": {
        "BailingMoeV2_5ForCausalLM": Alone(arguments=UNCACHED),
        "BailingMoeV3ForCausalLM": Alone(arguments=UNCACHED),
        "BailingMoeV3VLForConditionalGeneration": Alone(
            arguments=UNCACHED | {"limit_mm_per_prompt": NO_MEDIA}
        ),
        "DiffusionGemmaForBlockDiffusion": Alone(True, {"limit_mm_per_prompt": NO_MEDIA}),
        "ClefOmniForJointSchema": Alone(
            arguments={"runner": "pooling", "limit_mm_per_prompt": NO_MEDIA}
        ),
        # vLLM's kernels for the CPU have no limit in SwiGLU.
        "DeepseekV41ForCausalLM": Alone(arguments={"limit_mm_per_prompt": NO_MEDIA}, hot=0),
        "Dots3NoteForCausalLM": Alone(arguments={"limit_mm_per_prompt": NO_MEDIA}),
        "InklingForCausalLM": Alone(True),
        "InklingForConditionalGeneration": Alone(arguments={"limit_mm_per_prompt": NO_MEDIA}),
        "LongcatFlashNgramForCausalLM": Alone(),
        # vLLM's kernels for the CPU have no limit in SwiGLU, and no SituGLU.
        "Glm5NextForCausalLM": Alone(arguments=UNCACHED, hot=0),
        "Glm5NextForConditionalGeneration": Alone(
            arguments=UNCACHED | {"limit_mm_per_prompt": NO_MEDIA}, hot=0
        ),
        "KimiLinearForCausalLM": Alone(arguments=UNCACHED),
        "KimiK3ForConditionalGeneration": Alone(
            True, UNCACHED | {"limit_mm_per_prompt": NO_MEDIA}, hot=0
        ),
        "GraniteMoeHybridForCausalLM": Alone(),
        "JambaForCausalLM": Alone(),
        "MiniMaxM3SparseForCausalLM": Alone(arguments=SWIGLUOAI, hot=0),
        "MiniMaxM3SparseForConditionalGeneration": Alone(
            True, {"limit_mm_per_prompt": NO_MEDIA}, hot=0
        ),
        "Mistral4ForCausalLM": Alone(),
        "NemotronHForCausalLM": Alone(True, changed={"routed_scaling_factor": 2.5}, hot=0),
    },
    "sglang": {
        "BailingMoeV2_5ForCausalLM in SGLang": Alone(arguments=LINEAR),
        "BailingMoeV3ForCausalLM in SGLang": Alone(arguments=LINEAR),
        "BailingMoeV3VLForConditionalGeneration in SGLang": Alone(arguments=LINEAR),
        "DeepseekV32ForCausalLM": Alone(),
        # SGLang's kernel for the CPU knows GELU by its other name only.
        "DiffusionGemmaForBlockDiffusion": Alone(True, {"enable_multimodal": False}, hot=0),
        "DeepseekV4ForCausalLM": Alone(True, changed=UNSCALED, hot=0, written=COMPRESSED),
        "Dots3NoteForCausalLM in SGLang": Alone(arguments=PAGED, changed=UNSCALED),
        "ExaoneMoeForCausalLM": Alone(arguments={"attention_backend": "triton"}),
        "GigaChat35ForCausalLM": Alone(changed=UNSCALED),
        "Glm4MoeLiteForCausalLM": Alone(),
        "GlmMoeDsaForCausalLM": Alone(),
        "GraniteMoeHybridForCausalLM": Alone(arguments=LINEAR),
        "HYV4ForCausalLM": Alone(hot=0),
        "Glm5NextForConditionalGeneration in SGLang": Alone(arguments=PAGED, hot=0),
        "HunYuanDenseV1ForCausalLM": Alone(),
        "HunYuanMoEV1ForCausalLM": Alone(),
        "InternS2PreviewForConditionalGeneration": Alone(
            arguments=LINEAR | {"enable_multimodal": False}
        ),
        "InklingForConditionalGeneration in SGLang": Alone(
            True, {"mamba_radix_cache_strategy": "extra_buffer", "enable_multimodal": False}
        ),
        "KimiLinearForCausalLM": Alone(arguments=LINEAR, changed=UNSCALED),
        "IQuestQ1ForCausalLM": Alone(),
        "InternS2MobiusForConditionalGeneration in SGLang": Alone(
            arguments=LINEAR | {"enable_multimodal": False, "moe_runner_backend": "triton"},
            written={"model_type": "interns2_mobius"},
        ),
        "K2HorizonForCausalLM in SGLang": Alone(arguments=BFLOAT16, near=0.01),
        "KimiK3LinearForCausalLM": Alone(arguments=LINEAR),
        "KimiK3ForConditionalGeneration in SGLang": Alone(
            True, LINEAR | {"enable_multimodal": False}
        ),
        "LLaDA2MoeModelLM": Alone(),
        "Lfm2MoeForCausalLM": Alone(arguments=LINEAR),
        "MiniCPMV": Alone(arguments=LINEAR | {"enable_multimodal": False}),
        "MiniCPMV4_6ForConditionalGeneration in SGLang": Alone(
            arguments=LINEAR | {"enable_multimodal": False}
        ),
        "MiniCPMV4_7ForConditionalGeneration in SGLang": Alone(
            arguments=LINEAR | {"enable_multimodal": False}
        ),
        "MiniMaxM2ForCausalLM": Alone(True),
        # Of hot experts, SGLang's kernel for the CPU would compute SiLU.
        "MiniMaxM3SparseForCausalLM": Alone(arguments=overriding(hidden_act="swigluoai"), hot=0),
        "MiniMaxM3SparseForConditionalGeneration": Alone(
            arguments={"enable_multimodal": False}, hot=0
        ),
        "NemotronHForCausalLM": Alone(
            True, LINEAR | {"moe_runner_backend": "triton"}, UNSCALED, hot=0
        ),
        "Qwen3_5MoeForCausalLM": Alone(arguments=LINEAR),
        "Qwen3_5MoeForConditionalGeneration": Alone(True, LINEAR | {"enable_multimodal": False}),
        "Qwen4ExpForConditionalGeneration": Alone(arguments=PAGED),
        "SDARMoeForCausalLM": Alone(),
        "XllmForCausalLM": Alone(arguments=BFLOAT16, near=0.01),
    },
}
RUNS = [
    (engine, name)
    for engine, classes in CLASSES.items()
    for name, alone in classes.items()
    if alone.usual or FULL or RESULTS
]
# Classes whose layers return a rank's part, which the model sums over ranks after the layer.
SEVERAL = [("vllm", "MiniMaxM3SparseForConditionalGeneration")]
if FULL:
    SEVERAL.append(("vllm", "InklingForCausalLM"))
RANKS = 2
# The last one: a kernel for GPUs.
VARIABLES = {
    "TORCHDYNAMO_DISABLE": "1",
    "TRITON_INTERPRET": "1",
    "SGLANG_OPT_USE_FUSED_HASH_TOPK": "0",
}
TOKENS = 40

pytestmark = pytest.mark.timeout(TIMEOUT)


@pytest.fixture(scope="module")
def inputs(folder: Path) -> Path:
    """x [T, H] and the numbers of the tokens [T]."""
    torch.manual_seed(5)
    x = torch.randn(TOKENS, COMMON["hidden_size"]).bfloat16().float()
    tokens = torch.randint(VOCABULARY, (TOKENS,))
    save_file({"x": x, "tokens": tokens}, folder / "inputs")
    return folder / "inputs"


@pytest.fixture(scope="module")
def models(folder: Path) -> Callable[[str, str], Path]:
    """Checkpoint of a class for an engine, written when it is first asked for."""

    def of(engine: str, name: str) -> Path:
        path, alone = folder / f"{engine} {name}", CLASSES[engine][name]
        if not path.exists():
            config = make(name, path, **alone.changed) / "config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | alone.written))
        return path

    return of


@pytest.fixture(scope="module")
def answers(
    folder: Path, inputs: Path, models: Callable[[str, str], Path]
) -> Callable[[str], Answers]:
    """Of an engine; it runs when it is first asked for."""
    found: dict[str, Answers] = {}

    def placed(engine: str, name: str, kind: str, job: dict[str, Any]) -> dict[str, Any]:
        outputs = str(_outputs(folder, engine, name, kind))
        return job | {"name": f"{name} {kind}", "inputs": str(inputs), "outputs": outputs}

    def of(engine: str) -> Answers:
        python = os.environ.get(f"KT_{engine.upper()}_PYTHON")
        if python is None:
            pytest.skip(f"KT_{engine.upper()}_PYTHON is not set (make test sets it)")
        if engine not in found:
            runs = []
            for name in (name for of, name in RUNS if of == engine):
                alone, model = CLASSES[engine][name], str(models(engine, name))
                options = {"method": "BF16", "num_gpu_experts": alone.hot, "allow_untested": True}
                if alone.hot == 0:  # needs no kernel of the engine
                    options["weight_path"] = model
                given = FAMILIES[name].on_cpu(engine) or {}
                one = {"model": model, "kt": options, "engine": given | alone.arguments}
                kinds = {"ours": one}
                if RESULTS and alone.hot:
                    kinds["stock"] = one | {"kt": None}
                for kind, job in kinds.items():
                    runs.append(placed(engine, name, kind, job))
                if (engine, name) in SEVERAL:
                    ranks = {"tensor_parallel_size": RANKS, "distributed_executor_backend": "mp"}
                    one = one | {"engine": one["engine"] | ranks}
                    runs.append(placed(engine, name, "ranks", one))
            module = {"vllm": test_vllm, "sglang": test_sglang}[engine]
            env = module.environment(**VARIABLES)
            script = f"{engine}_moe_layers.py"
            found[engine] = run(python, script, folder / engine, env, runs=runs)
        return found[engine]

    return of


def _published(name: str) -> str:
    return FAMILIES[name].published or name


def _outputs(folder: Path, engine: str, name: str, kind: str) -> Path:
    return folder / f"{engine} {name} {kind}"


@pytest.mark.parametrize(("engine", "name"), RUNS)
def test_outputs_are_those_of_transformers(
    engine: str,
    name: str,
    folder: Path,
    inputs: Path,
    models: Callable[[str, str], Path],
    answers: Callable[[str], Answers],
) -> None:
    """Also the stock engine's, if it computed them."""
    alone, found = CLASSES[engine][name], answers(engine)
    reference = FamilyReference(name, models(engine, name))
    wanted = outputs(reference, inputs)

    def zero(layer: int, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        down.zero_()

    with reference.changed(zero, range(alone.hot, EXPERTS)):
        wrong = outputs(reference, inputs)

    def distances(kind: str, to: torch.Tensor) -> torch.Tensor:
        assert "error" not in found[f"{name} {kind}"], found[f"{name} {kind}"]
        written = load_file(_outputs(folder, engine, name, kind))
        own = torch.stack([written[str(number)] for number in range(len(written))])
        assert own.shape == to.shape == (reference.moe_layers, *own.shape[1:])
        return ((own - to).norm(dim=-1) / wanted.norm(dim=-1)).flatten()

    near, far = distances("ours", wanted), distances("ours", wrong)
    print(f"{engine} {name}: max {near.max():.4f} mean {near.mean():.4f} far {far.mean():.3f}")
    assert near.max() < alone.near
    assert far.mean() > 20 * near.mean()
    stock = None
    if f"{name} stock" in found:
        stock = distances("stock", wanted)
        assert stock.max() < alone.near
    keep(
        engine,
        os.environ[f"KT_{engine.upper()}_PYTHON"],
        _published(name),
        near,
        far,
        stock,
        hot=alone.hot,
        of=EXPERTS,
        part=MOE_LAYER,
    )


@pytest.mark.parametrize(("engine", "name"), SEVERAL)
def test_two_ranks(
    engine: str,
    name: str,
    folder: Path,
    inputs: Path,
    models: Callable[[str, str], Path],
    answers: Callable[[str], Answers],
) -> None:
    """The ranks' outputs sum up to those of transformers: the cold experts are computed once."""
    found = answers(engine)[f"{name} ranks"]
    assert "error" not in found, found
    wanted = outputs(FamilyReference(name, models(engine, name)), inputs)
    path = str(_outputs(folder, engine, name, "ranks"))
    parts = [load_file(rank_outputs(path, rank)) for rank in range(RANKS)]
    own = torch.stack([sum(part[str(number)] for part in parts) for number in range(len(wanted))])
    near = (own - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    print(f"{name}, two ranks: max {near.max():.4f} mean {near.mean():.4f}")
    assert near.max() < CLASSES[engine][name].near


@torch.no_grad()
def outputs(reference: FamilyReference, inputs: Path) -> torch.Tensor:
    """Those of the modules around transformers' experts, [layers, T, H]. If these are whole layers
    with attention, those of the experts with the router beside them."""
    given, found = load_file(inputs), []
    experts = {id(stacks[0]) for stacks in reference.parameters()}
    modules = dict(reference.model.named_modules())
    for place, module in modules.items():
        own = {id(one) for one in module.parameters(recurse=False)} & experts
        if not own:
            continue
        experts -= own
        block = modules[place.rpartition(".")[0]]
        if hasattr(block, "self_attn"):
            _, weights, ids = block.router(given["x"])
            found.append(module(given["x"], ids, weights))
            continue
        takes_tokens = "input_ids" in inspect.signature(block.forward).parameters
        more = {"input_ids": given["tokens"][None]} if takes_tokens else {}
        out = block(given["x"][None], **more)
        found.append((out[0] if isinstance(out, tuple) else out).reshape(given["x"].shape))
    return torch.stack(found)


@pytest.mark.parametrize("engine", CLASSES)
def test_the_list_is_those_that_passed(engine: str) -> None:
    passed = classes_that_passed(engine, MOE_LAYER)
    assert layers_tested_in({"vllm": "vLLM", "sglang": "SGLang"}[engine]) == passed
    for one in CLASSES[engine]:
        assert {one, _published(one)} & {*passed}, one
