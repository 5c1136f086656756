"""Experts of gpt-oss in streamed batches: with biases, a limit and an alpha."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from simulated_gpu import divide_routes, interleaves, products
from streamed_layers import (
    BOTH,
    BUS_ONLY,
    CPU,
    INNER,
    THRESHOLD,
    E,
    FakeDevice,
    H,
    K,
    answers,
    batch,
    stream,
)

from kt_kernel.moe.placement import COLD, Placement
from kt_kernel.serving import streaming, streaming_start
from kt_kernel.serving.activations import GPT_OSS
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.serving.hybrid_model import HybridModel
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.testing import row_error

pytest.importorskip("triton")


def make_gpt_oss(monkeypatch: pytest.MonkeyPatch, folder: Path, pools: int) -> HybridLayer:
    """With biases, gate and up in turn in the file, and hot experts 4 and 1."""
    g, base = torch.Generator().manual_seed(1), "model.layers.3.mlp.experts"
    sizes = {"gate_up_proj": (E, H, 2 * INNER), "down_proj": (E, INNER, H)}
    tensors = {name: torch.randn(size, generator=g) / 8 for name, size in sizes.items()}
    tensors |= {
        f"{name}_bias": torch.randn(E, size[2], generator=g) for name, size in sizes.items()
    }
    named = {f"{base}.{name}": tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    placement = Placement((COLD, 1, COLD, COLD, 0, COLD), 2)
    monkeypatch.setattr(HybridModel, "placement_of", lambda *given: placement)
    given = {"method": "BF16", "cpuinfer": 2, "threadpool_count": pools, "num_gpu_experts": 2}
    model = HybridModel(KTOptions(weight_path=str(folder), **given))
    made = model.add_layer(
        layer_idx=3,
        num_experts=E,
        num_experts_per_tok=K,
        hidden_size=H,
        moe_intermediate_size=INNER,
        activation=GPT_OSS,
        has_bias=True,
    )
    made.finish_loading()
    return made


@pytest.mark.parametrize("rates", [BOTH, BUS_ONLY], ids=["both", "bus"])
@pytest.mark.parametrize("pools", [1, 2])
def test_experts_of_gpt_oss(monkeypatch, tmp_path, rates, pools) -> None:
    """With biases, and with gate and up in turn, as the engines' kernels want them."""
    layer = make_gpt_oss(monkeypatch, tmp_path, pools)
    alone = make_gpt_oss(monkeypatch, tmp_path, pools)
    packed = layer.wrapper.packed_experts()
    assert packed.biased
    packed.interleaved = True
    assert packed.load_biases(CPU) == len(packed.held) * (2 * INNER + H) * 4
    lane = stream(layer, rates)
    for tokens in (THRESHOLD - 1, THRESHOLD, 40):
        inputs, copied = batch(tokens), lane.copied
        found, want = answers(layer, inputs), answers(alone, inputs)
        assert row_error(found[1], want[1].double()).max() < 0.01
        assert (lane.copied > copied) == (tokens >= THRESHOLD)


def test_the_start_with_experts_of_gpt_oss(monkeypatch, tmp_path) -> None:
    """The log has the memory of the biases; an engine without such kernels streams nothing."""
    monkeypatch.setattr(streaming, "divide_routes", divide_routes)
    layer = make_gpt_oss(monkeypatch, tmp_path, 1)
    for known in (interleaves, lambda activation: None):
        engine = streaming_start.EngineSide(products, known, lambda _: 1 << 40)
        start = streaming_start.start_streaming
        options = KTOptions(gpu_prefill_token_threshold=THRESHOLD)
        arguments = [layer], options, CPU, torch.bfloat16, engine, FakeDevice
        if known is interleaves:
            line = start(*arguments)
            assert "with all biases, for 4 experts at a time" in line, line
            continue
        with pytest.raises(OptionError, match="swiglu_alpha=1.702, which cannot be streamed"):
            start(*arguments)
