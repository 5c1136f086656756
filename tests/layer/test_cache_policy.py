"""What the live cache moves, on generated routes, beside the simulator of ideal caches."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cached_model import InstantUploads

from kt_kernel.device.cache import HostCache
from kt_kernel.moe.placement import Placement
from kt_kernel.routes.policies import DecayedLFU
from kt_kernel.routes.simulator import Replay
from kt_kernel.routes.synthetic import NONE, QWEN3_30B, WEAK, Locality, generate
from kt_kernel.serving.cache import CachedLayer, ModelCache
from kt_kernel.serving.cache_policy import Gain
from kt_kernel.serving.cache_slots import LayerSlots

LAYERS, TOKENS = 2, 800
SMALL = {"experts": 64, "per_token": 4}


def made(experts: int, slots: int, rate: float | None = None) -> tuple[ModelCache, HostCache]:
    memory = HostCache(torch.device("cpu"), LAYERS, experts)
    layers = [
        CachedLayer(
            SimpleNamespace(expert_bytes=1),  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            LayerSlots(Placement.first(experts, slots), memory.wanted[number]),
        )
        for number in range(LAYERS)
    ]
    cache = ModelCache(layers, memory, InstantUploads(), rate)
    cache.start(memory)
    return cache, memory


def replayed(cache: ModelCache, memory: HostCache, routes: np.ndarray) -> float:
    """The hit rate of the second half. routes: [T, L, k]."""
    half = {}
    for number, token in enumerate(routes):
        for layer in range(LAYERS):
            memory.begin_pass(layer, torch.from_numpy(token[None, layer].astype(np.int64)), None)
        cache.step()
        cache.step()
        if number == len(routes) // 2:
            half = cache.stats()
    end = cache.stats()
    hits, misses = (end[name] - half[name] for name in ("cache_hits", "cache_misses"))
    cache.close()
    return hits / (hits + misses)


@pytest.mark.parametrize(
    ("locality", "policy"),
    [(QWEN3_30B, DecayedLFU(3, margin=0.1)), (WEAK, DecayedLFU(64, margin=1.0))],
)
def test_the_policy_that_the_routes_reward(locality: Locality, policy: Any) -> None:
    record = generate(replace(locality, **SMALL), TOKENS, LAYERS)
    ideal = Replay(record, TOKENS // 2)
    cache, memory = made(64, 16)
    found = replayed(cache, memory, record.routes)
    assert cache.policy == policy.name
    assert found > 0.93 * ideal.run(policy, 16).hit_rate
    assert found > 1.3 * ideal.first(16).hit_rate


def test_moves_that_gain_nothing_get_little_of_the_bus() -> None:
    shares = []
    for locality in (QWEN3_30B, NONE):
        cache, memory = made(64, 16, rate=1e9)
        replayed(cache, memory, generate(replace(locality, **SMALL), TOKENS, LAYERS).routes)
        cache._fill_budget()
        cache._filled -= 1  # a second
        cache._budget = 0.0
        cache._fill_budget()
        shares.append(cache._budget / (cache.rate or 1) / 0.01)
    assert shares[0] == pytest.approx(1) and shares[1] == pytest.approx(1 / 64)


@pytest.mark.parametrize(
    ("mean", "share"), [(-1, 1 / 64), (0.5, 1 / 64), (1, 0.25), (2, 0.75), (2.5, 1), (9, 1)]
)
def test_uploads_take_as_much_as_they_gain(mean: float, share: float) -> None:
    gain = Gain()
    gain.mean = mean
    assert gain.share == share and gain.pays == (mean >= 0.5)


def test_the_rate_bounds_uploads() -> None:
    """Every upload is of one byte, and the first one takes more than there is for hours."""
    cache, memory = made(64, 16, rate=1e-9)
    replayed(cache, memory, generate(replace(QWEN3_30B, **SMALL), 100, LAYERS).routes)
    assert cache.counters.cache_uploads <= 1
    assert cache.layers[0].slots.coming_free + cache.layers[1].slots.coming_free <= 8


def test_what_was_evicted_does_not_come_back_at_once() -> None:
    """Slots that are kept empty are for what is wanted, however often the cache looks."""
    record = generate(replace(QWEN3_30B, **SMALL), TOKENS, LAYERS)
    ideal = Replay(record, TOKENS // 2).run(DecayedLFU(3, margin=0.1), 32)
    cache, memory = made(64, 32)
    begun = 0
    for number, token in enumerate(record.routes):
        for layer in range(LAYERS):
            memory.begin_pass(layer, torch.from_numpy(token[None, layer].astype(np.int64)), None)
            for _ in range(3):
                cache.step()
        if number == TOKENS // 2:
            begun = cache.counters.cache_uploads
    assert cache.counters.cache_uploads - begun < 1.25 * ideal.uploads


def test_a_benchmark_with_fewer_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures the cache of a model that has no more: as many are kept empty."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    cache, _ = made(128, 64)
    control = importlib.import_module("cache_control").Control(cache)
    for slots in (32, 64, 31):
        control.reset(slots, lambda: None)
        for layer, like in zip(cache.layers, made(128, slots)[0].layers, strict=True):
            assert (layer.slots.wanted == like.slots.wanted).all() and not layer.slots.free
            assert cache._kept_empty(layer) == cache._kept_empty(like) > 0


def test_no_slot_is_kept_empty_while_moves_do_not_pay() -> None:
    cache, memory = made(64, 32, rate=1e9)
    replayed(cache, memory, generate(replace(NONE, **SMALL), TOKENS, LAYERS).routes)
    assert not cache._gain.pays
    for layer in cache.layers:
        assert layer.slots.num_slots - layer.slots.resident.sum() <= 1
