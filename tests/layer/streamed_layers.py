"""Hybrid layers whose long batches are streamed, with simulated copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated_gpu import ImmediateLane, Pins, products

from kt_kernel.device.streaming.rates import Rates
from kt_kernel.device.streaming.streamer import ExpertStreamer
from kt_kernel.moe.placement import COLD, Placement
from kt_kernel.serving import streaming
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.serving.hybrid_model import HybridModel
from kt_kernel.serving.options import KTOptions
from kt_kernel.weights.expert_tensors import MATRICES

E, K, H, INNER, THRESHOLD = 6, 2, 64, 96, 8
CPU = torch.device("cpu")
PER_TOKEN = ((1, 0.07), (2, 0.12))
BOTH = Rates(0.5, PER_TOKEN)  # experts with few tokens stay on the CPU
BUS_ONLY = Rates(1e-6, ((1, 1.0),))
CPU_ONLY = Rates(1e6, ((1, 0.1),))


class FakeDevice:
    def __init__(self, device: torch.device) -> None:
        self.lane, self.backend = ImmediateLane(), Pins()


def make(monkeypatch: pytest.MonkeyPatch, hot: tuple[int, ...] = (), **options: Any) -> HybridLayer:
    slots = [hot.index(e) if e in hot else COLD for e in range(E)]
    placement = Placement(tuple(slots), len(hot))
    monkeypatch.setattr(HybridModel, "placement_of", lambda *given: placement)
    given = {"method": "INT4_G32", "cpuinfer": 2, "num_gpu_experts": len(hot)} | options
    model = HybridModel(KTOptions(**given))
    made = model.add_layer(
        layer_idx=3,
        num_experts=E,
        num_experts_per_tok=K,
        hidden_size=H,
        moe_intermediate_size=INNER,
    )
    g = torch.Generator().manual_seed(0)
    sizes = ((INNER, H), (INNER, H), (H, INNER))
    for expert in range(E):
        for which, size in zip(MATRICES, sizes, strict=True):
            weights = (torch.randn(size, generator=g) / 8).bfloat16()
            if expert not in hot:
                made.add_weight(expert, which, weights)
    made.finish_loading()
    return made


def stream(layer: HybridLayer, rates: Rates, room: int = 2) -> ImmediateLane:
    """Streams the layer's batches from THRESHOLD tokens on; ``room`` experts fit on the device."""
    lane, experts = ImmediateLane(), layer.wrapper.packed_experts()
    one = 2 * experts.expert_bytes + 2 * experts.expert_values
    streamer = ExpertStreamer(lane, room * one, experts)
    layer.start_streaming(
        streaming.ModelStreaming(streamer, lane, rates, THRESHOLD, products), experts
    )
    return lane


def batch(tokens: int, ids_dtype: torch.dtype = torch.int32) -> tuple:
    """Expert 0 has half of the routes; one id does not exist."""
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, H, generator=g).bfloat16()
    ids = torch.randint(0, E, (tokens, K), generator=g)
    ids[:, 0] = 0
    ids[-1, 0] = E
    return x, ids.to(ids_dtype), torch.rand(tokens, K, generator=g)


def answers(layer: HybridLayer, inputs: tuple, **more: Any) -> tuple[Any, torch.Tensor]:
    x = inputs[0]
    routes = layer.submit(*inputs, cold_slot=-1, **more)
    return routes, layer.collect(x, torch.ones_like(x), scale=2.0)
