"""Speculative decoding in vLLM on the CPU: the runs for test_model_classes.py, and their checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_model
from eagle_model import METHODS, make_draft
from engines import HOT, Answers
from family_models import PROMPTS
from mtp_model import make_mtp

STEPS = 24
MTP = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    "disable_log_stats": False,
}
NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
}


def eagle(method: str, draft: Path) -> dict[str, Any]:
    """Arguments of vLLM for a draft of `eagle_model`."""
    return {
        "speculative_config": {
            "method": method,
            "model": str(draft),
            "num_speculative_tokens": 2,
        },
        "disable_log_stats": False,
    }


_REPEATED = [[3 + (5 * j) % 11 for j in range(24)], [10, 11, 12, 13] * 6, [20, 30, 40] * 7]


def runs(folder: Path, qwen: Path) -> list[dict[str, Any]]:
    """The runs of one vLLM process, for its end: after n-grams, vLLM 0.32 starts no engine on the
    CPU. folder: for new models. qwen: a model with experts in several layers."""
    model = str(make_mtp(folder / "mtp"))
    options = {"method": "BF16", "num_gpu_experts": HOT}
    mtp = {"model": model, "steps": STEPS, "prompts": PROMPTS}
    ngram = {"model": str(qwen), "steps": STEPS, "prompts": _REPEATED, "kt": options}
    return [
        mtp | {"name": "without mtp", "kt": options},
        mtp | {"name": "stock mtp", "kt": None, "engine": MTP},
        mtp | {"name": "mtp", "kt": options, "engine": MTP},
        mtp
        | {
            "name": "mtp with other experts",
            "model": str(make_mtp(folder / "mtp-other", offset=1)),
            "kt": options,
            "engine": MTP,
        },
        *_eagle_runs(folder / "eagle", options),
        ngram | {"name": "without n-grams"},
        ngram | {"name": "n-grams", "engine": NGRAM},
    ]


def _eagle_runs(folder: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    target = tiny_model.make(folder / "target")
    reference = tiny_model.Reference(target)
    prompts = tiny_model.clear_prompts(reference, count=3, tries=32)
    same = {"model": str(target), "steps": tiny_model.STEPS, "prompts": prompts}
    runs = []
    for method in METHODS:
        for name, kt, shift in (
            (f"stock {method}", None, 0),
            (method, options, 0),
            (f"{method} that is wrong", options, 1),
        ):
            draft = folder / name
            make_draft(draft, "vllm", method, reference, prompts, tiny_model.STEPS, shift)
            runs.append(same | {"name": name, "kt": kt, "engine": eagle(method, draft)})
    return [same | {"name": "without eagle", "kt": options}, *runs]


def check_eagle(answers: Answers) -> None:
    """The text is that without a draft, and as many tokens are accepted as in the stock engine: the
    draft gets the hidden states that it was fitted to. Of a draft that is always wrong, none is."""
    tokens = answers["without eagle"]["tokens"]
    for method in METHODS:
        names = (f"stock {method}", method, f"{method} that is wrong")
        for name in names:
            assert answers[name]["tokens"] == tokens, answers[name]
        stock, ours, wrong = (answers[name]["accepted"] for name in names)
        print(f"accepted tokens: stock {stock}, with cold experts {ours}, control {wrong}")
        assert ours == stock > len(tokens) * tiny_model.STEPS / 4 and wrong == 0


def check_mtp(answers: Answers) -> None:
    """The text is that without MTP, and as many tokens are predicted as in the stock engine: the
    draft model's experts are right. With its experts in the wrong places, few are predicted."""
    tokens = answers["without mtp"]["tokens"]
    for name in ("stock mtp", "mtp", "mtp with other experts"):
        assert answers[name]["tokens"] == tokens, answers[name]
    stock, ours, other = (
        answers[name]["accepted"] for name in ("stock mtp", "mtp", "mtp with other experts")
    )
    print(f"accepted tokens: stock {stock}, with cold experts {ours}, control {other}")
    assert len(tokens) * STEPS > ours == stock > 2 * other
    # The model computes several tokens of a request at once, in fewer passes.
    (layer,), (single,) = (
        [each for each in answers[name]["stats"] if each] for name in ("mtp", "without mtp")
    )
    assert layer["forwards"] < 0.7 * single["forwards"] and layer["tokens"] > single["tokens"]


def check_ngrams(answers: Answers) -> None:
    """The text is that without n-grams, in fewer passes."""
    found, single = answers["n-grams"], answers["without n-grams"]
    assert found["tokens"] == single["tokens"], found
    counts = [(a["forwards"], a["tokens"]) for a in (found["stats"][0], single["stats"][0])]
    assert counts[0][0] < counts[1][0] and counts[0][1] > counts[1][1], counts
