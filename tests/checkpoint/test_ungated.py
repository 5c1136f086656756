"""Experts without a gate, as Nemotron-H's checkpoints have them: read, packed and computed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from kt_kernel import KTMoEWrapper
from kt_kernel.checkpoint import open_checkpoint
from kt_kernel.conversion.plan import Request, make_plan
from kt_kernel.serving.model_config import (
    described_layers,
    expert_sizes,
    number_of_layers,
    routed_model,
)
from kt_kernel.testing import moe_reference, row_error

E, H, I, LAYER, TOP_K = 4, 64, 96, 3, 2  # noqa: E741
SIZES = {"up": (I, H), "down": (H, I)}
EVERY = torch.arange(E)


def write(folder: Path, method: str, kind: str = "nemotron_h") -> dict[str, torch.Tensor]:
    """Writes one layer; returns the values of its matrices, [E, N, K] each."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, list[torch.Tensor]] = {name: [] for name in SIZES}
    for expert in range(E):
        for name, size in SIZES.items():
            weight = torch.randn(size, generator=generator).to(torch.bfloat16)
            place = f"backbone.layers.{LAYER}.mixer.experts.{expert}.{name}_proj"
            if method == "FP8_PERCHANNEL":
                scale = torch.rand(size[0], 1, generator=generator) + 0.5
                codes = weight.to(torch.float8_e4m3fn)
                tensors |= {f"{place}.weight": codes, f"{place}.weight_scale": scale}
                weight = codes.float() * scale
            else:
                tensors[f"{place}.weight"] = weight
            values[name].append(weight.float())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return {name: torch.stack(each) for name, each in values.items()}


def wrapper(folder: Path, method: str, gated: bool = False) -> KTMoEWrapper:
    return KTMoEWrapper(
        layer_idx=LAYER,
        num_experts=E,
        num_experts_per_tok=TOP_K,
        hidden_size=H,
        moe_intermediate_size=I,
        gpu_experts_mask=None,
        cpuinfer_threads=1,
        threadpool_count=1,
        weight_path=str(folder),
        chunked_prefill_size=16,
        method=method,
        activation="relu2",
        gated=gated,
    )


@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "FP8_PERCHANNEL"])
def test_layer(method: str, tmp_path: Path) -> None:
    values = write(tmp_path, method)
    assert open_checkpoint(tmp_path).sizes(LAYER) == (E, H, I)
    layer = wrapper(tmp_path, method)
    layer.load_weights(EVERY)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, H, generator=generator).to(torch.bfloat16)
    ids = torch.stack([torch.randperm(E, generator=generator)[:TOP_K] for _ in range(9)])
    weights = torch.rand(9, TOP_K, generator=generator)
    y = layer.forward(x, ids, weights, None)
    known = "AMXINT8" if method == "AMXINT8" else "BF16"
    want = moe_reference(
        x, ids, weights, None, values["up"], values["down"], activation="relu2", method=known
    )
    assert row_error(y.double(), want).max() < 1e-2
    wrong = moe_reference(x, ids, weights, None, values["up"], values["down"], activation="gelu")
    assert row_error(y.double(), wrong).max() > 0.3


def test_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write(model, "BF16")
    with pytest.raises(ValueError, match="have no gate, but gated=True"):
        wrapper(model, "BF16", gated=True).load_weights(EVERY)
    request = Request(input_path=str(model), output=str(tmp_path / "out"), method="AMXINT8")
    with pytest.raises(ValueError, match="the experts of layer 3 have no gate; packed directories"):
        make_plan(request)
    # A family whose experts have a gate lacks it.
    write(model, "BF16", kind="glm4_moe")
    (model / "config.json").unlink()
    with pytest.raises(ValueError, match=r"tensor '.*experts.0.gate_proj.weight' is missing"):
        open_checkpoint(model).sizes(LAYER)


def test_configuration() -> None:
    config = SimpleNamespace(
        num_hidden_layers=4,
        n_routed_experts=8,
        layers_block_type=["mamba", "moe", "attention", "moe"],
        hidden_size=64,
        moe_latent_size=32,
        moe_intermediate_size=96,
    )
    assert described_layers(config) == [1, 3]
    del config.num_hidden_layers  # as transformers 5 writes it
    assert described_layers(config) == [1, 3] and number_of_layers(config) == 4
    assert routed_model(config).num_hidden_layers == 4
    assert expert_sizes(config) == (32, 96)
    config.routed_expert_hidden_size = config.moe_latent_size  # of Kimi-K3
    config.moe_latent_size = None
    assert expert_sizes(config) == (32, 96)
