"""A multimodal model with an image in each prompt, in vLLM on the CPU.

Log-probabilities are those of transformers in float32 with the same images, and far from those
without the cold experts, and from those with black images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_vllm
import torch
from engines import COLD, HOT, TIMEOUT, Answers
from families_multimodal import PATCHES, VISION_TOKENS
from family_models import EXPERTS, FamilyReference, make
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

NAME = "Qwen3VLMoeForConditionalGeneration"
WORDS = {
    VISION_TOKENS["image_token_id"]: "<|image_pad|>",
    VISION_TOKENS["video_token_id"]: "<|video_pad|>",
    VISION_TOKENS["vision_start_token_id"]: "<|vision_start|>",
    VISION_TOKENS["vision_end_token_id"]: "<|vision_end|>",
}
IMAGE, START, END = (
    VISION_TOKENS[f"{name}_token_id"] for name in ("image", "vision_start", "vision_end")
)
PROMPTS = [[5, 6, START, IMAGE, END, 7, 9], [11, START, IMAGE, END, 8, 3, 90, 17]]
SIZES = [(64, 96), (128, 64)]  # height and width of the image in each
STEPS = 8
HOTS = (0, HOT, EXPERTS)

pytestmark = [
    pytest.mark.skipif(
        test_vllm.PYTHON is None, reason="KT_VLLM_PYTHON is not set (make test sets it)"
    ),
    pytest.mark.timeout(TIMEOUT),
]


@pytest.fixture(scope="module")
def processor() -> Any:
    patch = PATCHES["vision_config"]["patch_size"]
    size = {"shortest_edge": 32 * 32, "longest_edge": 128 * 128}
    return Qwen2VLImageProcessorPil(
        patch_size=patch, temporal_patch_size=2, merge_size=2, size=size
    )


@pytest.fixture(scope="module")
def model(folder: Path, processor: Any) -> Path:
    """With the files of its tokenizer and image processor."""
    path = make(NAME, folder / NAME)
    names = ["<unk>", "<s>", "</s>"]
    names += [WORDS.get(i, f"t{i}") for i in range(len(names), max(WORDS) + 1)]
    words = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=[*WORDS.values()],
    ).save_pretrained(path)
    processor.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def images(folder: Path) -> list[Path]:
    numbers, paths = np.random.default_rng(0), []
    for i, size in enumerate(SIZES):
        pixels = numbers.integers(0, 256, (*size, 3), dtype=np.uint8)
        paths.append(folder / f"{i}.png")
        Image.fromarray(pixels).save(paths[-1])
    return paths


@pytest.fixture(scope="module")
def answers(folder: Path, model: Path, images: list[Path]) -> Answers:
    given = {
        "images": [str(path) for path in images],
        "engine": {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1, "video": 0}},
    }
    runs = [
        given | {"name": f"{hot} hot", "kt": {"method": "BF16", "num_gpu_experts": hot}}
        for hot in HOTS
    ]
    return test_vllm.run(
        folder / "engine",
        test_vllm.environment(TORCHDYNAMO_DISABLE="1"),
        model=str(model),
        prompts=PROMPTS,
        steps=STEPS,
        runs=runs,
        inspect_here=True,
    )


@pytest.mark.parametrize("hot", HOTS)
def test_logprobs_are_those_of_transformers(
    hot: int, model: Path, images: list[Path], processor: Any, answers: Answers
) -> None:
    answer = answers[f"{hot} hot"]
    assert "error" not in answer, answer
    reference = FamilyReference(NAME, model)
    found = torch.tensor(answer["logprobs"]).flatten()

    def distance(shown: list[Path] | list[None]) -> float:
        wanted = logprobs(reference, processor, answer["tokens"], shown)
        return (wanted - found).abs().mean().item()

    def zero(layer: int, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        down.zero_()

    near = distance(images)
    with reference.changed(zero, COLD):
        far = distance(images)
    black = distance([None] * len(images))
    print(f"{hot} hot: mean {near:.4f} far {far:.3f} black images {black:.3f}")
    assert near < 0.01 and far > 10 * near and black > 10 * near


@torch.no_grad()
def logprobs(
    reference: FamilyReference,
    processor: Any,
    tokens: list[list[int]],
    images: list[Path] | list[None],
) -> torch.Tensor:
    """Of the tokens after each prompt, in one row. Without a file, an image is black."""
    rows = []
    for prompt, size, row, path in zip(PROMPTS, SIZES, tokens, images, strict=True):
        black = Image.fromarray(np.zeros((*size, 3), dtype=np.uint8))
        given = processor(Image.open(path) if path else black, return_tensors="pt")
        count = int(given["image_grid_thw"].prod()) // processor.merge_size**2
        ids = [i for token in prompt for i in [token] * (count if token == IMAGE else 1)]
        ids = torch.tensor([ids + row])
        types = (ids == IMAGE).int()
        logits = reference.model(ids, mm_token_type_ids=types, use_cache=False, **given).logits
        scores = logits[0, -len(row) - 1 : -1].log_softmax(-1)
        rows.append(scores.gather(-1, torch.tensor(row)[:, None])[:, 0])
    return torch.cat(rows)
