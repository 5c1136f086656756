"""kt model check without an engine: the small configurations and models, and the verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from kt_kernel.checkpoint import open_checkpoint
from kt_kernel.serving import class_check
from kt_kernel.serving.class_check import _compare, _distance, installed_engine, read_config
from kt_kernel.serving.small_model import small_config, text_layers, write_small_model


def published(name: str, **settings: Any) -> dict[str, Any]:
    config = getattr(transformers, f"{name}Config")()
    return config.to_dict() | {"architectures": [f"{name}ForCausalLM"]} | settings


@pytest.mark.parametrize(
    ("name", "settings", "layers"),
    [
        ("Qwen3Moe", {}, 3),
        ("Qwen3Next", {}, 4),  # every fourth layer has full attention
        ("Glm4MoeLite", {"first_k_dense_replace": 1}, 3),
        ("Mixtral", {}, 3),
    ],
)
def test_a_small_model(name: str, settings: dict[str, Any], layers: int, tmp_path: Path) -> None:
    """Of the same class, with every kind of layer; the control has the experts moved on by one."""
    config = published(name, **settings)
    small = small_config(config)
    assert small["num_hidden_layers"] == layers
    if config.get("layer_types"):
        assert set(small["layer_types"]) == set(config["layer_types"])
    write_small_model(small, tmp_path)
    assert json.loads((tmp_path / "model/config.json").read_text())["architectures"] == [
        f"{name}ForCausalLM"
    ]
    model, control = (open_checkpoint(tmp_path / part) for part in ("model", "control"))
    layer = model.layers()[-1]
    sizes = model.sizes(layer)
    assert sizes[0] == 8
    right, wrong = (one.read_experts(layer, *sizes) for one in (model, control))
    for matrix in ("gate", "up", "down"):
        kept, moved = getattr(right, matrix), getattr(wrong, matrix)
        assert all(moved[e].equal(kept[e - 1]) and not moved[e].equal(kept[e]) for e in range(8))


def test_a_small_model_whose_layers_are_listed() -> None:
    """Nemotron-H's, as published and as transformers 5 writes it: each kind of layer is there."""
    for listed in (
        {"hybrid_override_pattern": "M*ME-E", "num_hidden_layers": 6},
        {"layers_block_type": ["mamba", "attention", "mamba", "moe", "mlp", "moe"]},
    ):
        small = small_config({"model_type": "nemotron_h", "n_routed_experts": 16} | listed)
        config = transformers.AutoConfig.for_model(**small)
        assert config.hybrid_override_pattern == "M*ME-" and config.n_routed_experts == 8
        assert small["num_hidden_layers"] == config.num_hidden_layers == 5


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("Qwen3VLMoe", ["text_config"]),
        ("Qwen3OmniMoe", ["thinker_config", "text_config"]),
        ("Glm4vMoe", ["text_config"]),
        ("Llama4", ["text_config"]),
    ],
)
def test_a_small_multimodal_model(name: str, path: list[str], tmp_path: Path) -> None:
    """With the layers of the text model, and its experts in the form of published checkpoints."""
    config = published(name) | {"architectures": [f"{name}ForConditionalGeneration"]}
    small = small_config(config)
    write_small_model(small, tmp_path)
    written = json.loads((tmp_path / "model/config.json").read_text())
    assert written["architectures"] == small["architectures"] == config["architectures"]
    assert sum(file.stat().st_size for file in (tmp_path / "model").iterdir()) < 50e6
    text = written
    for inner in path:
        text = text[inner]
    assert text["num_hidden_layers"] == text_layers(small) and text["vocab_size"] == 544
    tokens = {key: value for key, value in written.items() if key.endswith("_token_id")}
    assert all(512 <= value < 544 for key, value in tokens.items() if key[:3] not in ("bos", "eos"))
    model, control = (open_checkpoint(tmp_path / part) for part in ("model", "control"))
    layer = model.layers()[-1]
    sizes = model.sizes(layer)
    assert sizes == (8, 256, 128)
    right, wrong = (one.read_experts(layer, *sizes) for one in (model, control))
    for matrix in ("gate", "up", "down"):
        kept, moved = getattr(right, matrix), getattr(wrong, matrix)
        assert all(moved[e].equal(kept[e - 1]) and not moved[e].equal(kept[e]) for e in range(8))


def test_a_small_model_has_the_names_of_published_ones(tmp_path: Path) -> None:
    """transformers writes others for Kimi-K2.5, which the engines do not read."""
    config = transformers.Kimi_K25Config().to_dict()
    config |= {"architectures": ["KimiK25ForConditionalGeneration"]}
    write_small_model(small_config(config), tmp_path)
    for part in ("model", "control"):
        names = open_checkpoint(tmp_path / part).tensors
        assert "language_model.model.layers.0.input_layernorm.weight" in names
        of_text = [name for name in names if name.startswith("language_model.")]
        assert not any(".blocks." in name for name in of_text)
        assert {"mm_projector", "language_model", "vision_tower"} == {
            name.partition(".")[0] for name in names
        }


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"text_config": {"hidden_size": 2}}, "has no number of layers"),
        ({"num_hidden_layers": 2, "model_type": "unknown_moe"}, "model_type 'unknown_moe'"),
        (published("Llama") | {"num_key_value_heads": 8}, "has no experts"),
    ],
)
def test_what_cannot_be_checked(config: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=line):
        write_small_model(small_config(config), tmp_path)


def answer(*, near: float = 0.0, tokens: int = 5) -> dict[str, Any]:
    return {
        "prompt": [[-1.0 + near] * 20],
        "tokens": [[tokens, 6]],
        "decoded": [[-2.0 + near, -3.0 + near]],
    }


NAMES = ["stock", "no hot experts", "2 hot experts", "control"]


@pytest.mark.parametrize(
    ("distances", "problem"),
    [
        ((0.01, 0.02, 0.9), ""),
        ((0.01, 0.2, 0.9), "log-probabilities differ"),
        ((0.01, float("nan"), 0.9), "log-probabilities differ"),
        ((0.01, 0.02, 0.05), "the comparison shows nothing"),
        ((0.0, 0.0, 0.0), "the comparison shows nothing"),
        ((0.01,), "it fails with kt options (2 hot experts): ValueError: no"),
    ],
)
def test_the_verdict(distances: tuple[float, ...], problem: str) -> None:
    runs = zip(NAMES, (0.0, *distances))  # noqa: B905 - a run that fails has no answer
    answers = {name: answer(near=distance) for name, distance in runs}
    found, said = _compare(answers, NAMES, "INFO x\nValueError: no\nbye", "float32")
    assert said.startswith(problem) and bool(said) == bool(problem)
    assert found == pytest.approx(dict(zip(NAMES[1:], distances, strict=False))) or (
        found["2 hot experts"] == float("inf")
    )


@pytest.mark.parametrize(
    ("engine", "tried"),
    [
        ("vllm", [("float32", None), ("bfloat16", None)]),
        (
            "sglang",
            [("float32", "torch_native"), ("float32", "triton"), ("bfloat16", "torch_native")],
        ),
    ],
)
def test_what_is_tried_on_the_cpu(
    engine: str, tried: list[tuple[str, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stock engine may serve the class in another way than the first one: SGLang has MLA, as in
    Kimi-K2.5, not in its attention in torch, but in Triton's."""
    served = len(tried)
    found: list[tuple[str, str | None]] = []

    def serve(engine: str, job: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
        found.append((job["dtype"], job["arguments"].get("attention_backend")))
        assert job["arguments"]["other"] == 1
        return (dict.fromkeys(NAMES, answer()) if len(found) == served else {}), "its log"

    monkeypatch.setattr(class_check, "_serve", serve)
    monkeypatch.setattr(class_check, "_version_of", lambda engine: "1")
    monkeypatch.setattr(class_check, "write_small_model", lambda config, folder: None)

    def check() -> class_check.Verdict:
        found.clear()
        config = {"num_hidden_layers": 2}
        return class_check.check_class(config, engine, device="cpu", arguments={"other": 1})

    for served in range(1, len(tried) + 1):
        assert "the comparison shows nothing" in check().problem
        assert found == tried[:served]
    served += 1
    with pytest.raises(RuntimeError, match="itself does not serve a small model.*its log"):
        check()
    assert found == tried


def test_tokens_after_the_first_difference_do_not_count() -> None:
    other = answer() | {"tokens": [[7, 6]], "decoded": [[-9.0, -9.0]]}
    assert _distance(answer(), other) == 0.0


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--engine trt: unknown engine; accepted: vllm, sglang"):
        installed_engine("trt")
    with pytest.raises(ValueError, match="no such folder, and not a repository name"):
        read_config(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: list, expected a JSON object"):
        read_config(str(tmp_path))
