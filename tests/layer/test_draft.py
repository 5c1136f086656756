"""The options and the chain of a draft model that has experts of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kt_kernel.moe.placement import Placement
from kt_kernel.serving.draft import draft_options
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.serving.hybrid_model import HybridModel
from kt_kernel.serving.options import KTOptions

E, K, H, INNER = 6, 2, 64, 48
MODEL = {
    "weight_path": "/model",
    "expert_lora_path": "/adapter",
    "record_kt_expert_routes": "/routes",
    "gpu_prefill_token_threshold": 512,
    "cpuinfer": 1,
}


@pytest.mark.parametrize(
    ("given", "quantisation", "method", "hot"),
    [
        ({"method": "AMXINT4", "num_gpu_experts": 2}, None, "AMXINT4", 2),
        ({"method": "BF16", "gpu_experts_ratio": 0.5}, "", "BF16", 3),
        ({"method": "AMXINT4", "num_gpu_experts": E + 2}, None, "AMXINT4", E),  # it has fewer
        ({"method": "RAWINT4", "num_gpu_experts": 2}, None, "BF16", 2),  # BF16 weights arrive
        ({"method": "BF16", "gpu_experts_mask": "/mask"}, None, "BF16", 0),
        (
            {"method": "BF16", "num_gpu_experts": 2, "expert_stats": "/statistics"},
            None,
            "BF16",
            2,
        ),
        ({"method": "FP8", "num_gpu_experts": 2}, "fp8", "BF16", E),
        ({"method": "AWQ_INT4"}, "awq", "BF16", E),
    ],
)
def test_options(given: dict[str, Any], quantisation: str | None, method: str, hot: int) -> None:
    made = draft_options(KTOptions(**MODEL | given), quantisation)
    assert made.method == method and made.weight_path is None
    assert HybridModel(made, draft=True).placement_of(0, E) == Placement.first(E, hot)
    assert made.expert_lora_path is None and not made.records
    assert made.gpu_prefill_token_threshold == 0 and made.cpuinfer == 1


def load(layer: HybridLayer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for expert in layer.placement.cold_experts:
        for which, size in (("gate", (INNER, H)), ("up", (INNER, H)), ("down", (H, INNER))):
            layer.add_weight(expert, which, torch.randn(size, generator=generator) / 8)
    layer.finish_loading()


def test_a_draft_has_a_chain_of_its_own() -> None:
    """It is built after the served model, whose last layer still defers nothing. Passes of the two
    in turns do not change each other's results."""
    options = KTOptions(
        method="BF16", num_gpu_experts=0, cpuinfer=1, max_deferred_experts_per_token=1
    )
    sizes = dict(
        num_experts=E,
        num_experts_per_tok=K,
        hidden_size=H,
        moe_intermediate_size=INNER,
    )
    model, draft = HybridModel(options), HybridModel(draft_options(options, None), draft=True)
    layers = [model.add_layer(layer_idx=number, **sizes) for number in (0, 1)]
    for number, layer in enumerate(layers):
        load(layer, number)
    generator = torch.Generator().manual_seed(5)
    batches = [
        (
            torch.randn(tokens, H, generator=generator),
            torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(tokens)]),
            torch.rand(tokens, K, generator=generator),
        )
        for tokens in (4, 1, 4)
    ]

    def one(layer: HybridLayer, batch: Any) -> torch.Tensor:
        layer.submit(*batch)
        return layer.collect(batch[0]).clone()

    alone = [[one(layer, batch) for layer in layers] for batch in batches]
    extra = draft.add_layer(layer_idx=2, **sizes)
    load(extra, 2)
    drafted = [one(extra, batch) for batch in batches]
    for batch, expected, of_draft in zip(batches, alone, drafted, strict=True):
        found = [one(layer, batch) for layer in layers]
        assert all(map(torch.equal, found, expected))
        assert torch.equal(one(extra, batch), of_draft)
    # The first layer of the model does defer.
    whole = [HybridModel(KTOptions(method="BF16", cpuinfer=1)).add_layer(layer_idx=0, **sizes)]
    load(whole[0], 0)
    assert not torch.equal(one(whole[0], batches[1]), alone[1][0])
    assert "draft model: 1 MoE layers" in draft.describe()
