"""Wrong use of wrapped models and of `kt sft train`: each ends with a message that names the layer.

What the layers themselves refuse is in test_core_errors.py and test_sft_interface.py.
"""

from __future__ import annotations

import threading

import pytest
import torch

from kt_kernel.cli.main import app
from kt_kernel.cli.running import run as command
from kt_kernel.sft import wrap_experts

from .models import fill_lora, tiny, tokens
from .training import write_settings

SETTINGS = dict(lora_rank=4, lora_alpha=8.0, cpuinfer_threads=2, threadpool_count=1)
IDS, SCORES = torch.tensor([[0, 1], [2, 3], [1, 1]]), torch.rand(3, 2)


@pytest.fixture
def model():
    made = tiny("qwen3_moe", torch.float32, num_hidden_layers=2)
    fill_lora(wrap_experts(made, **SETTINGS, chunked_prefill_size=64))
    return made


def experts(model, layer=1):
    return model.model.layers[layer].mlp.experts


def test_a_model_is_wrapped_once(model):
    with pytest.raises(ValueError, match="the experts are wrapped already"):
        wrap_experts(model, **SETTINGS)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            {"x": torch.randn(3, 31)},
            ValueError,
            r"hidden_states must be \[..., 32\], got \[3, 31\]",
        ),
        ({"x": torch.ones(3, 32, dtype=torch.long)}, ValueError, "hidden_states has dtype"),
        ({"x": torch.randn(65, 32)}, ValueError, "65 tokens exceed chunked_prefill_size=64"),
        ({"ids": IDS[:, :1]}, ValueError, r"expert_ids must be \[3, 2\], got \[3, 1\]"),
        ({"ids": IDS.float()}, ValueError, "expert_ids has dtype torch.float32"),
        ({"scores": SCORES[:2]}, ValueError, r"weights must be \[3, 2\], got \[2, 2\]"),
        ({"scores": IDS}, ValueError, "weights has dtype torch.int64"),
    ],
)
def test_tensors(model, change, error, text):
    given = {"x": torch.randn(3, 32), "ids": IDS, "scores": SCORES} | change
    with pytest.raises(error, match=f"layer 1: {text}"):
        experts(model)(*given.values())
    experts(model)(torch.randn(3, 32), IDS, SCORES).sum().backward()


def test_weights_that_are_not_finite(model):
    with torch.no_grad():
        experts(model).lora_parameters()["down_lora_a"][2, 0, 3] = float("nan")
    with pytest.raises(ValueError, match="layer 1: down_lora_a of expert slot 2 has a value that"):
        model(tokens())


def test_two_threads_in_one_module():
    """Whoever comes second gets an error that names the layer, and the first one its result."""
    made = tiny("qwen3_moe", torch.float32, num_hidden_layers=1, hidden_size=256)
    wrap_experts(made, **SETTINGS)
    module = experts(made, 0)
    x, ids, scores = torch.randn(2048, 256), torch.randint(4, (2048, 2)), torch.rand(2048, 2)
    found: list[str] = []

    def call() -> None:
        try:
            with torch.no_grad():
                module(x, ids, scores)
        except RuntimeError as error:
            found.append(str(error))

    for _ in range(50):  # a busy machine may run one after the other
        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if found:
            break
    assert found
    assert all("layer 0: " in text and "use a wrapper from one thread" in text for text in found)
    with torch.no_grad():
        module(x, ids, scores)


@pytest.mark.parametrize("nonfinite", ["error", "propagate"])
@pytest.mark.parametrize("where", ["loss", "weight"])
def test_gradients_of_experts_on_the_gpu(nonfinite, where):
    """They are checked, too, where no expert of the CPU was selected."""
    made = tiny("qwen3_moe", torch.float32, num_hidden_layers=1)
    modules = wrap_experts(made, **SETTINGS, num_gpu_experts=2, nonfinite=nonfinite)
    fill_lora(modules)
    module = experts(made, 0)
    x = torch.randn(3, 32, requires_grad=True)
    out = module(x, torch.tensor([[0, 1], [1, 0], [1, 1]]), SCORES)
    grad = torch.ones_like(out)
    if where == "loss":
        grad[1, 3] = float("nan")
    else:
        grad[:, :] = 3e38  # the products overflow in float32
    if nonfinite == "propagate":
        out.backward(grad)
        assert not x.grad.isfinite().all()
        return
    with pytest.raises(RuntimeError, match="layer 0: grad_.* has a NaN or infinite value in"):
        out.backward(grad)


def test_a_training_that_diverges(tmp_path, capsys):
    """`kt sft train` ends with one line that names the layer and what was not finite."""
    path = write_settings(
        tmp_path, "diverged", training={"learning_rate": 1e30, "max_grad_norm": 0}
    )
    assert command(app, ["sft", "train", str(path)]) == 1
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("kt: error: layer 1: grad_output has a NaN or infinite value in token")
    assert last.endswith("The training diverged; try a lower learning_rate")
