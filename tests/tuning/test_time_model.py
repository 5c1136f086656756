"""The time model of kt tune: closed cases, a simulation of batches, and limits that always hold."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kt_kernel.device.streaming.rates import COPIES_AHEAD
from kt_kernel.tuning.model import (
    HAND_OVER,
    HOT_KERNELS,
    STEP_KERNELS,
    STREAMED_HOST,
    Load,
    Setting,
    TimeModel,
    _pairs,
)
from kt_kernel.tuning.rates import (
    CpuRates,
    EngineRates,
    GpuRates,
    HostRates,
    at_least,
    between,
    rising,
)
from kt_kernel.tuning.shape import Shape, as_config, shape_of

E, K, H, INTER, LAYERS = 64, 8, 1024, 512, 6
WEIGHTS = 3 * H * INTER
SHAPE = Shape(
    name="model",
    layers=LAYERS,
    moe_layers=tuple(range(1, LAYERS)),
    experts=E,
    top_k=K,
    hidden=H,
    inter=INTER,
    value_bytes=2,
    rest_bytes=100_000_000,
    layer_bytes=60_000_000,
    head_bytes=20_000_000,
    attention=1024,
    reach=(math.inf,) * LAYERS,
    kv_bytes=LAYERS * 1000,
)
MOE = LAYERS - 1
EACH, REST = 20e-6, 50e-6  # seconds of an expert with one row, and of a layer's rest
GPU = GpuRates("GPU", 80 << 30, ((1, REST), (64, REST)), 2e-6, 2e12, 5e14, 50e9, ((1, 6e-5),))
ENGINE = EngineRates("vllm", ((1, 1e-4), (16, 2e-4)), 1e-3, 0.5)
STEP = 1e-4
HEAD = 6e-5 + STEP_KERNELS * GPU.kernel
CACHE = 1000 / GPU.bandwidth  # of each token of a context and each layer


def linear(method: str = "INT4_G32", each: float = EACH, threads: int | None = None) -> CpuRates:
    """A CPU that takes as long for each expert, and for each row after the first sixteen."""
    rows = ((1, each), (16, each), (1024, 64 * each))
    return CpuRates(method, threads, WEIGHTS * 0.5625, ((1, each), (E, E * each)), rows)


def setting(hot: int = 0, cpu: CpuRates | None = None, **more: Any) -> Setting:
    return Setting(Load.uniform(SHAPE, hot), cpu or linear(), WEIGHTS * 2, **more)


def model(context: int = 0, device: Any = GPU, engine: EngineRates = ENGINE) -> TimeModel:
    return TimeModel(SHAPE, device, engine, context)


def test_curves() -> None:
    points = (2, 10.0), (4, 20.0), (8, 60.0)
    assert [between(points, x) for x in (1, 2, 3, 4, 6, 8, 12)] == [5, 10, 15, 20, 40, 60, 100]
    assert at_least(points, 1) == 10 and at_least(points, 3) == 15
    assert between(((4, 1.0),), 2) == 0.5
    assert rising(((1, 2.0), (2, 1.0), (4, 3.0))) == ((1, 2.0), (2, 2.0), (4, 3.0))


def test_one_token_without_hot_experts() -> None:
    over = HAND_OVER + 2 * 2 * H / GPU.bus
    wanted = HEAD + LAYERS * REST + MOE * (over + K * EACH)
    assert math.isclose(model().decode(setting(), 1), wanted)
    # The KV cache of each layer is read, too.
    with_context = model(1000).decode(setting(), 1)
    assert math.isclose(with_context, wanted + LAYERS * 1000 * CACHE)


def test_all_experts_hot() -> None:
    hot = HOT_KERNELS * GPU.kernel + K * WEIGHTS * 2 / GPU.bandwidth
    wanted = HEAD + LAYERS * REST + MOE * hot
    assert math.isclose(model().decode(setting(E), 1), wanted)


def test_the_host_may_take_longer() -> None:
    slow = replace(ENGINE, step=((1, 1.0), (16, 4.0)))
    assert model(engine=slow).decode(setting(), 1) == 1.0
    assert math.isclose(model(engine=slow).decode(setting(), 6), 2.0)


def test_both_sides_work_at_the_same_time() -> None:
    """With half of the experts hot, a layer takes as long as the slower side."""
    for each, slower in ((EACH, "cpu"), (EACH / 1000, "gpu")):
        found = model().decode(setting(E // 2, linear(each=each)), 1)
        cold = HAND_OVER + 2 * 2 * H / GPU.bus + K / 2 * each
        hot = HOT_KERNELS * GPU.kernel + K / 2 * WEIGHTS * 2 / GPU.bandwidth
        assert (cold > hot) == (slower == "cpu")
        assert math.isclose(found, HEAD + LAYERS * REST + MOE * max(cold, hot))


def test_deferral_hides_the_shorter_side() -> None:
    over = HAND_OVER + 2 * 2 * H / GPU.bus
    for each in (EACH, 2e-6):
        found = model().decode(setting(0, linear(each=each), deferred=4), 1)
        layer = max(REST + over + 4 * each, over + 8 * each)
        assert math.isclose(found, HEAD + REST + MOE * layer)
    # What all tokens of a large batch need at once cannot be deferred.
    many = [model().decode(setting(0, deferred=d), 512) for d in (0, 1)]
    assert math.isclose(*many, rel_tol=0.01)


@pytest.mark.parametrize("tokens", [1, 4, 16])
@pytest.mark.parametrize("hot", [0, 16, 48])
@pytest.mark.parametrize("deferred", [0, 2])
def test_batches_against_a_simulation(tokens: int, hot: int, deferred: int) -> None:
    """Numbers of touched experts, with random routes as the oracle."""
    random = np.random.default_rng(1)
    runs = 400
    touched = np.zeros(3)
    for _ in range(runs):
        routes = np.argsort(random.random((tokens, E)), 1)[:, :K]  # in the order of their weights
        cold = set(routes[routes >= hot].tolist())
        kept = routes[:, : K - deferred]
        touched += len(cold), len(set(routes[routes < hot].tolist())), len(set(kept[kept >= hot]))
    ((_, batch),) = Load.uniform(SHAPE, hot).batches(tokens)
    found = batch.cold, batch.hot, batch.at_once(deferred, K)[0]
    assert np.allclose(found, touched / runs, rtol=0.03, atol=0.1)


def test_statistics_decide_what_is_touched() -> None:
    """Two of the experts take all tokens, so with both hot nothing is left for the CPU."""
    chance = np.zeros((1, E))
    chance[0, [3, 5]] = 1
    cold = Load(chance, np.zeros((1, E), bool), np.array([MOE]))
    hot = Load(chance, chance > 0, np.array([MOE]))
    ((layers, batch),) = cold.batches(16)
    assert (layers, batch.cold, batch.cold_routes, batch.held) == (MOE, 2, 32, E)
    ((_, batch),) = hot.batches(16)
    assert (batch.cold, batch.hot, batch.hot_routes) == (0, 2, 32)
    assert model().decode(replace(setting(), load=hot), 1) < model().decode(setting(E), 1)


def test_prompts_on_the_cpu() -> None:
    """A pass of 1,024 tokens has 128 rows of each expert; 4,096 tokens are four passes."""
    tokens = 4096
    one_pass = E * between(((16, EACH), (1024, 64 * EACH)), 128)
    rest = (2 * 60_000_000 / 2 / LAYERS * tokens + 2 * 1024 * tokens**2) / (0.5 * GPU.flops)
    over = HAND_OVER + 2 * 2 * H * tokens / GPU.bus
    wanted = STEP + HEAD + LAYERS * rest + MOE * (over + 4 * one_pass)
    assert math.isclose(model().prefill(setting(), tokens), wanted)
    assert model().prefill(setting(E), 16) == STEP + LAYERS * ENGINE.launch


def test_streamed_prompts() -> None:
    """With a slow CPU, all experts go over the bus, or the GPU's products take longer than that."""
    slow = linear(each=1e-2)
    one = replace(model(), device=replace(GPU, bus=5e9))
    streamed = setting(0, slow, streaming=100)
    rest = (2 * 10_000_000 / 2 * 1024 + 2 * 1024 * 1024**2) / (0.5 * GPU.flops)
    bus = E * slow.expert_bytes / 5e9
    # After the last copy, the last layer is unpacked and multiplied.
    unpack = E * (slow.expert_bytes + 2 * WEIGHTS) / GPU.bandwidth
    after = unpack + 2 * WEIGHTS * K * 1024 / (0.5 * GPU.flops)
    found = one.prefill(streamed, 1024)
    assert math.isclose(found, STEP + HEAD + rest + MOE * bus + after)
    products = MOE * 2 * WEIGHTS * K * 8192 / (0.5 * GPU.flops)
    assert one.prefill(streamed, 8192) > products
    # Shorter ones are not streamed.
    alone = replace(streamed, streaming=None)
    assert one.prefill(streamed, 99) == one.prefill(alone, 99)


def test_shared_prompts() -> None:
    """Both sides finish together: what the CPU does takes as long as the copies."""
    one = replace(model(), device=replace(GPU, bus=3e8))
    cpu = linear(each=1e-3)
    routes = 1024 * K / E  # of each expert
    on_cpu = 1.1 * between(((16, 1e-3), (1024, 64e-3)), routes)
    copy = cpu.expert_bytes / 3e8
    share = on_cpu / (on_cpu + copy)  # over the bus
    assert math.isclose(share * copy, (1 - share) * on_cpu)
    layer = E * share * copy + COPIES_AHEAD
    assert ENGINE.launch + STREAMED_HOST < layer < E * copy
    found = one.prefill(setting(0, cpu, streaming=1), 1024)
    rest = (2 * 10_000_000 / 2 * 1024 + 2 * 1024 * 1024**2) / (0.5 * GPU.flops)
    unpack = E * (cpu.expert_bytes + 2 * WEIGHTS) / GPU.bandwidth
    after = unpack + 2 * WEIGHTS * K * 1024 / (0.5 * GPU.flops)
    assert math.isclose(found, STEP + HEAD + rest + MOE * layer + after)
    # Where sharing gains too little, as the server decides, everything goes over the bus.
    slower = replace(cpu, token=1.0)
    found = one.prefill(setting(0, slower, streaming=1), 1024)
    assert math.isclose(found, STEP + HEAD + rest + MOE * E * copy + after)


def test_a_prompt_of_several_batches() -> None:
    """The second batch attends to the first one, too."""
    one = replace(model(), batch_tokens=1024, engine=replace(ENGINE, launch=0.0))
    first, both = one.prefill(setting(E), 1024), one.prefill(setting(E), 2048)
    attention = 4 * 1024 * 1024**2 / (0.5 * GPU.flops)  # of each token to 1,024 before
    assert math.isclose(both, 2 * first + LAYERS * attention)


@pytest.mark.parametrize(("tokens", "before"), [(1, 0), (100, 0), (100, 70), (300, 50), (7, 900)])
@pytest.mark.parametrize("reach", [0, 1, 64, 120, 128, math.inf])
def test_pairs_of_attention(tokens: int, before: int, reach: float) -> None:
    """Counted for each token, in the middle of which it sees half of itself."""
    counted = sum(min(reach, before + token + 0.5) for token in range(tokens))
    assert _pairs(tokens, before, reach) == pytest.approx(counted, abs=0.13)


def test_layers_that_do_not_attend_to_everything() -> None:
    """A quarter of the layers attends to everything, a half to 128 tokens."""
    reach = (math.inf, 128.0, 128.0, 0.0)
    shape = replace(SHAPE, layers=4, moe_layers=(), layer_bytes=0, reach=reach)
    engine = replace(ENGINE, launch=0.0, step=((1, 0.0),))
    none = Load(np.ones((1, 1)), np.ones((1, 1), bool), np.array([0]))  # no layer has experts
    found = replace(model(engine=engine), shape=shape).prefill(replace(setting(), load=none), 8192)
    windows = 128 * (8192 - 128) + 128**2 / 2
    assert found == pytest.approx(HEAD + 4 * 1024 * (8192**2 / 2 + 2 * windows) / (0.5 * GPU.flops))


@pytest.mark.parametrize(
    ("kinds", "reach"),
    [
        (["full_attention", "sliding_attention", "linear_attention"], (math.inf, 64.0, 0.0)),
        (["mamba", "attention", "moe"], (0.0, math.inf, 0.0)),
        # What is not known has a KV cache, for which the GPU must have room.
        (["indexed_attention", "compressed_sparse_attention", "new"], (math.inf,) * 3),
        (["full_attention"], (math.inf,) * 3),
        (None, (math.inf,) * 3),
    ],
)
def test_how_far_layers_attend(kinds: list[str] | None, reach: tuple[float, ...]) -> None:
    content = {"num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2}
    content |= {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4}
    content |= {"sliding_window": 64, "layer_types": kinds}
    shape = shape_of("m", as_config(content))
    assert shape.reach == reach
    assert shape.kv_bytes == sum(map(bool, reach)) * 2 * 64 * 2


def test_from_how_many_tokens_experts_are_streamed() -> None:
    begin = model().streaming_from(setting(0, linear(each=6e-5)))
    assert begin is not None and 1 < begin < 8192
    # A faster CPU, a slower bus, and fewer cold experts raise the number, or nothing is streamed.
    slower_bus = replace(model(), device=replace(GPU, bus=10e9))
    for other in (
        model().streaming_from(setting(0, linear(each=3e-5))),
        slower_bus.streaming_from(setting(0, linear(each=6e-5))),
        model().streaming_from(setting(32, linear(each=6e-5))),
    ):
        assert other is None or other > begin
    assert model().streaming_from(setting(0, linear(each=1e-9))) is None
    assert model().streaming_from(setting(E)) is None
    assert model(device=HostRates(1e10, 1e11)).streaming_from(setting()) is None


def test_without_a_gpu_everything_adds_up() -> None:
    host = HostRates(bandwidth=20e9, flops=1e11)
    rest = 60_000_000 / LAYERS / host.bandwidth
    found = model(device=host).decode(setting(), 1)
    head = 20_000_000 / host.bandwidth
    assert math.isclose(found, head + LAYERS * rest + MOE * K * EACH)


@given(
    each=st.floats(1e-6, 1e-3),
    hot=st.integers(0, E),
    streams=st.integers(1, 64),
    context=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_limits_that_always_hold(each: float, hot: int, streams: int, context: int) -> None:
    one, cpu = model(context), linear(each=each)
    cold = one.decode(setting(0, cpu), streams)
    some = one.decode(setting(hot, cpu), streams)
    both = cpu.seconds(E, 0) * 0 + one.decode(setting(E, cpu), streams)
    # Hot experts add the GPU's part at most, and a longer context or more streams take longer.
    assert some <= cold + both + 1e-12
    assert one.decode(setting(hot, cpu), streams + 1) >= some - 1e-12
    assert replace(one, context=context + 1).decode(setting(hot, cpu), streams) >= some
    deferred = one.decode(setting(hot, cpu, deferred=K), streams)
    assert deferred <= some + 1e-12
    slower = linear(each=2 * each)
    assert one.decode(setting(hot, slower), streams) >= some - 1e-12
