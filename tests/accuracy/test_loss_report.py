"""Loss of a tiny model with its experts computed here."""

import math
import shutil
import sys
from importlib.resources import files

import pytest
import torch

from kt_kernel.accuracy.loss import LossReport, load_model, loss_report, replace_experts

transformers = pytest.importorskip("transformers")
DEMO = files("kt_kernel") / "demo_model"
TEXT = "The loss of a text is what a model that was not trained says of it. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model"), seed=0)


def save(folder, seed, cls="Qwen3Moe", **settings):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{cls}Config")(
        **{
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 64,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mlp_only_layers": [1],
            "initializer_range": 0.3,
        }
        | settings
    )
    getattr(transformers, f"{cls}ForCausalLM")(config).bfloat16().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(DEMO / name, folder / name)
    return folder


def test_report(model):
    report = loss_report(model, model, "BF16", TEXT, window=50, threads=2)
    assert report.tokens == len(TEXT) - math.ceil(len(TEXT) / 50)
    assert report.before > 3 and report.after == pytest.approx(report.before, rel=1e-3)
    assert loss_report(model, model, "BF16", TEXT, tokens=60, threads=2).tokens == 59
    rough = loss_report(model, model, "AMXINT4", TEXT, window=50, threads=2)
    assert rough.before == report.before and abs(rough.after - rough.before) > 1e-3
    assert "perplexity" in str(report) and str(report.tokens) in str(report)
    assert LossReport(10, 1.0, 1.1).change == pytest.approx(math.exp(0.1) - 1)


def test_gpt_oss(tmp_path):
    """Its own activation, biases and interleaved rows."""
    path = save(
        tmp_path,
        1,
        "GptOss",
        num_local_experts=4,
        intermediate_size=64,
        layer_types=["full_attention"] * 3,
    )
    report = loss_report(path, path, "BF16", TEXT, window=50, threads=2)
    assert report.after == pytest.approx(report.before, rel=2e-3)


def test_weights_of_another_model(model, tmp_path):
    other = save(tmp_path, 1)
    with pytest.raises(ValueError, match="layer 0: the output is .*% off.*another model's weights"):
        loss_report(model, other, "AMXINT8", TEXT, threads=1)


def test_a_model_without_experts(model, tmp_path):
    path = save(tmp_path, 1, "Qwen3")
    with pytest.raises(ValueError, match="Qwen3ForCausalLM: no experts"):
        replace_experts(load_model(path), path, "BF16")


def test_a_text_too_short(model):
    with pytest.raises(ValueError, match="has 1 tokens; at least 2"):
        loss_report(model, model, "BF16", "a", threads=1)


def test_without_transformers(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers") as caught:
        loss_report(model, model, "BF16", TEXT)
    assert "\n" not in str(caught.value)
