"""DeepSeek-V4 in vLLM on the CPU, in 16 bits and with experts in MXFP4, for which the stock engine
has a kernel on CPUs with AMX only.

Log-probabilities are as near to those of transformers in float32 as the stock engine's, on the
engine's own text, and far from those of transformers with wrong experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_vllm
import torch
from class_results import OTHER_PLACES, RESULTS, keep
from deepseek_v4_model import (
    EXPERTS,
    LAYERS,
    NAME,
    TOP_K,
    WITH_IMAGES,
    DeepseekV4Reference,
    make_deepseek_v4,
    make_with_images,
)
from engines import TIMEOUT, Answers
from family_settings import NO_MEDIA
from tiny_model import computed_tokens, spread_prompts

HOT, STEPS = 20, 8
STAND_IN = "descriptions of batches"  # vllm_deepseek_v4.py has it
PROMPTS = spread_prompts(4, vocabulary=128)
# Of the publisher's command, and what the CPU needs. The model has no other cache.
ENGINE = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
PUBLISHED = ENGINE | {"block_size": 256, "enable_expert_parallel": True}
QUANTISED = {"MXFP4 0": 0, f"MXFP4 {HOT}": HOT}
AMX = torch.cpu._is_amx_tile_supported()
FP8 = f"FP8 and MXFP4 {HOT}"

pytestmark = [
    pytest.mark.skipif(
        test_vllm.PYTHON is None, reason="KT_VLLM_PYTHON is not set (make test sets it)"
    ),
    pytest.mark.skipif(
        "avx512f" not in Path("/proc/cpuinfo").read_text(),
        reason="vLLM's routing of this class needs a CPU with AVX-512",
    ),
    pytest.mark.timeout(TIMEOUT),
]


@pytest.fixture(scope="module")
def reference(folder: Path) -> DeepseekV4Reference:
    make_deepseek_v4(folder / "values", folder / "experts only", folder / "published")
    make_with_images(folder / "values", folder / "with images")
    return DeepseekV4Reference(folder / "values")


@pytest.fixture(scope="module")
def answers(folder: Path, reference: DeepseekV4Reference) -> Answers:
    plain = {"model": str(folder / "values"), "engine": ENGINE}
    with_images = {
        "model": str(folder / "with images"),
        "engine": ENGINE | {"limit_mm_per_prompt": NO_MEDIA},
    }
    experts_only = {"model": str(folder / "experts only"), "engine": PUBLISHED}
    published = {"model": str(folder / "published"), "engine": PUBLISHED}
    some = {"method": "BF16", "num_gpu_experts": HOT}
    runs: list[dict[str, Any]] = [
        plain | {"name": "stock", "kt": None},
        plain | {"name": "some hot", "kt": some},
        with_images | {"name": "with images, stock", "kt": None},
        with_images | {"name": "with images", "kt": some | {"allow_untested": bool(RESULTS)}},
        experts_only | {"name": "stock MXFP4", "kt": None},
        *(
            experts_only | {"name": name, "kt": {"num_gpu_experts": hot}}
            for name, hot in QUANTISED.items()
        ),
    ]
    if AMX:
        runs += [
            published | {"name": "stock FP8", "kt": None},
            published | {"name": FP8, "kt": {"num_gpu_experts": HOT}},
        ]
    return test_vllm.run(
        folder / "engine",
        test_vllm.environment(TORCHDYNAMO_DISABLE="1"),
        model=plain["model"],
        prompts=PROMPTS,
        steps=STEPS,
        runs=runs,
        inspect_here=True,
        modules=["vllm_deepseek_v4"],
    )


def test_16_bits(answers: Answers, reference: DeepseekV4Reference) -> None:
    near, far = _distances("some hot", answers, reference, without_cold=True)
    stock, _ = _distances("stock", answers, reference, without_cold=True)
    assert near.mean() < 2 * stock.mean()
    _check_calls(answers["some hot"], HOT)
    keep("vllm", test_vllm.PYTHON, NAME, near, far, stock, hot=HOT, of=EXPERTS, stand_in=STAND_IN)


def test_the_class_with_images(answers: Answers, reference: DeepseekV4Reference) -> None:
    """Prompts are text: vLLM's router for the CPU has no bias for images."""
    near, far = _distances("with images", answers, reference, without_cold=True)
    stock, _ = _distances("with images, stock", answers, reference, without_cold=True)
    assert near.mean() < 2 * stock.mean()
    _check_calls(answers["with images"], HOT)
    keep(
        "vllm",
        test_vllm.PYTHON,
        WITH_IMAGES,
        near,
        far,
        stock,
        hot=HOT,
        of=EXPERTS,
        stand_in=f"{STAND_IN} and the class",
    )


def test_the_stock_engine_serves_mxfp4_with_amx_only(
    answers: Answers, reference: DeepseekV4Reference
) -> None:
    if AMX:
        near, _ = _distances("stock MXFP4", answers, reference)
        ours, _ = _distances("MXFP4 0", answers, reference)
        assert ours.mean() < 2 * near.mean()
    else:
        assert "No MXFP4 MoE backend supports" in answers["stock MXFP4"]["error"]


@pytest.mark.parametrize("name", QUANTISED)
def test_mxfp4(name: str, answers: Answers, reference: DeepseekV4Reference) -> None:
    near, far = _distances(name, answers, reference)
    stock, _ = _distances("stock", answers, reference)
    assert near.mean() < 2 * stock.mean()
    _check_calls(answers[name], QUANTISED[name])
    _keep("MXFP4 of DeepSeek-V4", QUANTISED[name], near, far)


@pytest.mark.skipif(not AMX, reason="vLLM's kernels for dense FP8 layers need a CPU with AMX")
def test_as_published(answers: Answers, reference: DeepseekV4Reference) -> None:
    near, far = _distances(FP8, answers, reference)
    stock, _ = _distances("stock FP8", answers, reference)
    assert near.mean() < 2 * stock.mean()
    _check_calls(answers[FP8], HOT)
    _keep("MXFP4 of DeepSeek-V4, dense FP8", HOT, near, far, stock)


def _keep(
    experts: str,
    hot: int,
    near: torch.Tensor,
    far: torch.Tensor,
    stock: torch.Tensor | None = None,
) -> None:
    keep(
        "vllm",
        test_vllm.PYTHON,
        NAME,
        near,
        far,
        stock,
        experts=experts,
        hot=hot,
        of=EXPERTS,
        hot_format="bf16",
        control=OTHER_PLACES,
        stand_in=STAND_IN,
    )


def _distances(
    name: str, answers: Answers, reference: DeepseekV4Reference, without_cold: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances of log-probabilities from the reference's, and from those with wrong experts: each
    in the place of another one, or the cold ones missing."""
    answer = answers[name]
    assert "error" not in answer, answer
    found = torch.tensor(answer["logprobs"]).flatten()
    near = (reference.logprobs(PROMPTS, answer["tokens"]) - found).abs()
    if without_cold:
        with reference.changed(lambda layer, expert, up, down: down.zero_(), range(HOT, EXPERTS)):
            far = (reference.logprobs(PROMPTS, answer["tokens"]) - found).abs()
    else:
        reference.put(1)
        far = (reference.logprobs(PROMPTS, answer["tokens"]) - found).abs()
        reference.put()
    print(f"{name}: median {near.median():.4f} mean {near.mean():.4f} far {far.mean():.3f}")
    assert far.mean() > 3 * near.mean()
    return near, far


def _check_calls(answer: dict[str, Any], hot: int) -> None:
    """The CPU computed the routes to cold experts: all, or all but some."""
    calls, routes = sum(answer["expert_calls"]), LAYERS * TOP_K * computed_tokens(PROMPTS, STEPS)
    assert calls == routes if hot == 0 else routes / 3 < calls < routes
