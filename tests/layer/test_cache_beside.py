"""Swaps beside cancelled requests, speculative decoding and streaming."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cached_model import LAYERS, E, H, K, check_sums, make, random_weights, started
from grid import examples
from simulated_gpu import ImmediateLane, products

from kt_kernel.device.streaming.rates import Rates
from kt_kernel.device.streaming.streamer import ExpertStreamer
from kt_kernel.serving.streaming import ModelStreaming

STEPS = examples(10, full=20)
DRAFTED, MOST = 3, 24  # tokens that each request guesses; rows of a batch


def batches(seed: int) -> Any:
    """(x, ids, router weights), padding: what an engine computes while requests come, are cancelled
    at any step, and verify DRAFTED + 1 tokens each. Batches are padded to a captured size, and
    padding rows have ids of earlier batches."""
    rng, g = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    running = 1
    for step in range(STEPS):
        running = int(np.clip(running + rng.integers(-2, 3), 1, MOST // (DRAFTED + 1)))
        tokens = running * (DRAFTED + 1)
        rows = next(n for n in (4, 8, 16, MOST) if n >= tokens)
        if step % 10 == 4:
            tokens = rows = 40  # a prompt
        x = torch.randn(rows, H, generator=g).bfloat16()
        ids = torch.randint(0, E, (rows, K), generator=g, dtype=torch.int32)
        yield (x, ids, torch.rand(rows, K, generator=g)), torch.arange(rows) >= tokens


@pytest.mark.parametrize(("hot_format", "streamed"), [("engine", True), ("packed", False)])
def test_cancelled_requests_and_speculation(
    restless: None, streamed: bool, hot_format: str, request: pytest.FixtureRequest
) -> None:
    """Experts move at every batch, and each sum is that of the model with all experts cold. Tokens
    that are rejected later are computed and counted like others, padding is neither."""
    if hot_format == "packed":
        request.getfixturevalue("simulated_gpu")
    weights = random_weights()
    options: dict[str, Any] = {"gpu_prefill_token_threshold": 40} if streamed else {}
    model, engine = make(weights, hot_format=hot_format, **options)
    cold, _ = make(weights, num_gpu_experts=0, enable_dynamic_expert_update="off")
    if streamed:
        lane, rates = ImmediateLane(), Rates(0.5, ((1, 0.07), (2, 0.12)))
        streamer = ExpertStreamer(lane, 1 << 20, model.layers[0].wrapper.packed_experts())
        sharing = ModelStreaming(streamer, lane, rates, 40, products)
        for layer in model.layers:
            layer.start_streaming(sharing, layer.wrapper.packed_experts())
    cache, counted = started(model), 0
    for inputs, padding in batches(1):
        check_sums(model, cold, engine, inputs, padding=padding)
        cache.step()
        counted += int((~padding).sum()) * K * LAYERS
    stats = model.stats()
    assert stats["cache_hits"] + stats["cache_misses"] == counted
    assert stats["cache_uploads"] > STEPS and stats["cache_evictions"] > STEPS
    assert bool(stats.get("streamed_experts")) == streamed
