"""Models whose long batches are streamed to a real GPU; torch stands in for an engine's kernels."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from simulated_gpu import interleaves, products

from kt_kernel.serving.hybrid_model import HybridModel
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.streaming_start import EngineSide
from kt_kernel.testing import row_error
from kt_kernel.weights.expert_tensors import MATRICES

E, K, H, INNER, LAYERS = 32, 4, 1024, 512, 2
CUDA = torch.device("cuda", 0)


def make(seed: int, **options: Any) -> HybridModel:
    given = {"method": "INT4_G32", "cpuinfer": 4} | options
    model = HybridModel(KTOptions.from_mapping(given))
    g = torch.Generator().manual_seed(seed)
    sizes = ((INNER, H), (INNER, H), (H, INNER))
    for i in range(LAYERS):
        layer = model.add_layer(
            layer_idx=i,
            num_experts=E,
            num_experts_per_tok=K,
            hidden_size=H,
            moe_intermediate_size=INNER,
        )
        for expert in range(E):
            for which, size in zip(MATRICES, sizes, strict=True):
                layer.add_weight(expert, which, (torch.randn(size, generator=g) / 32).bfloat16())
        layer.finish_loading()
    return model


def stream(model: HybridModel) -> str:
    engine = EngineSide(products, interleaves, lambda device: torch.cuda.mem_get_info(device)[0])
    line = model.start_streaming(CUDA, torch.bfloat16, engine)
    assert line is not None
    return line


def batch(tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(1000 * seed + tokens)
    x = torch.randn(tokens, H, generator=g).bfloat16()
    ids = torch.rand(tokens, E, generator=g).topk(K).indices.int()
    return tuple(t.to(CUDA) for t in (x, ids, torch.rand(tokens, K, generator=g)))


def answers(model: HybridModel, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    found = []
    for layer in model.layers:
        layer.submit(*inputs, cold_slot=-1)
        found.append(layer.collect(inputs[0], None))
    return found


def check(model: HybridModel, alone: HybridModel, inputs: tuple[torch.Tensor, ...]) -> None:
    for mine, theirs in zip(answers(model, inputs), answers(alone, inputs), strict=True):
        assert row_error(mine.cpu(), theirs.double().cpu()).max() < 0.02


def test_the_default() -> None:
    """The threshold is measured, and the results are those of the CPU on both sides of it."""
    model, alone = make(0), make(0)
    line = stream(model)
    print(line)
    assert not any(model.stats().values())
    for tokens in (1, 64, 512, 4096):
        check(model, alone, batch(tokens))
    if "no experts are streamed" not in line:
        assert model.stats()["streamed_batches"] > 0


def test_two_models_and_thousands_of_batches() -> None:
    """Side by side, shared, whole and cancelled, without growth; then one of them goes."""
    models = [make(seed, gpu_prefill_token_threshold=64) for seed in range(2)]
    alone = [make(seed) for seed in range(2)]
    for model in models:
        print(stream(model))

    def some(count: int) -> None:
        for i in range(count):
            inputs = batch(64 + i % 150, i)
            for layer in (layer for model in models for layer in model.layers):
                layer.submit(*inputs, cold_slot=-1)
                if i % 10:  # others are given up
                    layer.collect(inputs[0], None)

    some(300)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(CUDA), torch.cuda.mem_get_info(CUDA)[0]
    some(1000)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated(CUDA) <= before[0]
    assert torch.cuda.mem_get_info(CUDA)[0] >= before[1] - (8 << 20)
    for model, other in zip(models, alone, strict=True):
        check(model, other, batch(300))
    del model, models[1]
    gc.collect()
    check(models[0], alone[0], batch(300))


@pytest.mark.parametrize("tokens", [200, 2000])
def test_trace(tokens: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's clock is converted: copies lie within the calls that began and awaited them."""
    import time

    from kt_kernel.device.tracer import tracer_of
    from kt_kernel.trace.reader import read
    from kt_kernel.trace.summary import summarise

    monkeypatch.setenv("KT_TRACE", str(tmp_path / "trace.json"))
    model = make(0, gpu_prefill_token_threshold=64)
    stream(model)
    spans = []
    for _ in range(5):
        begin = time.monotonic_ns() / 1e3
        answers(model, batch(tokens))
        torch.cuda.synchronize()
        spans.append((begin, time.monotonic_ns() / 1e3))
    answers(model, batch(100))
    tracer = tracer_of(CUDA)
    assert tracer is not None
    tracer.close()  # or its thread may be writing, and the next test would get the same one
    events = read(tmp_path / "trace.json")
    shown = [e for e in events if e["name"] == "streamed layer" and e["args"]["tokens"] == tokens]
    assert len(shown) >= 5 * LAYERS - 1
    for number, event in enumerate(shown):
        begin, end = spans[number // LAYERS]
        assert begin - 200 <= event["ts"] and event["ts"] + event["dur"] <= end + 200
    [found] = summarise(events, tokens).streamed
    print(found)
    assert 0 < found.gigabytes_s < 100
