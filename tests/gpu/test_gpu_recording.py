"""Recording on a real GPU: counts and routes in CUDA graphs, read while they are replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kt_kernel.routes.model import RoutedModel
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.recording import ModelRecording

LAYERS = 3


def recording(folder: Path, experts: int, k: int, capacity: int) -> ModelRecording:
    options = KTOptions(
        record_kt_gpu_expert_distribution=str(folder / "stats"),
        record_kt_expert_routes=str(folder / "routes"),
        expert_routes_tokens=capacity,
    )
    made = ModelRecording(options, RoutedModel("test", LAYERS, experts, k, 0, 0))
    for layer in range(LAYERS):
        made.add_layer(layer)
    return made


class Expected:
    """Counts one token after the other."""

    def __init__(self, experts: int) -> None:
        self.counts = np.zeros((LAYERS, experts))
        self.tokens: list[Any] = []
        self.passes: list[int] = []

    def add(self, number: int, ids: list[torch.Tensor], padding: torch.Tensor | None) -> None:
        experts = self.counts.shape[1]
        for row in range(len(ids[0])):
            if padding is not None and (
                bool(padding[row]) if padding.dtype == torch.bool else int(padding[row]) < 0
            ):
                continue
            token = []
            for layer, given in enumerate(ids):
                token.append([e if 0 <= e < experts else -1 for e in given[row].tolist()])
                for expert in token[-1]:
                    if expert >= 0:
                        self.counts[layer, expert] += 1
            self.tokens.append(token)
            self.passes.append(number)

    def check(self, made: ModelRecording, capacity: int) -> None:
        found, record = made.statistics(), made.routes()
        assert np.array_equal(found.counts, self.counts)
        assert (found.tokens == len(self.tokens)).all()
        assert record.routes.tolist() == self.tokens[:capacity]
        assert record.passes.tolist() == self.passes[:capacity]


def random_ids(tokens: int, experts: int, k: int, g: torch.Generator) -> list[torch.Tensor]:
    made = [torch.randint(-1, experts + 1, (tokens, k), generator=g) for _ in range(LAYERS)]
    for ids in made:
        ids[:, 0] = ids[:, 0].clamp(0, experts - 1)
    return made


@pytest.mark.parametrize(("experts", "k"), [(128, 8), (8, 2), (512, 10), (256, 6)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("padding_dtype", [None, torch.bool, torch.int64])
def test_eager(
    experts: int, k: int, dtype: torch.dtype, padding_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    made, expected = recording(tmp_path, experts, k, 200), Expected(experts)
    g = torch.Generator().manual_seed(0)
    for number, tokens in enumerate([1, 7, 300, 1]):
        ids = random_ids(tokens, experts, k, g)
        padding = None
        if padding_dtype is not None:
            mask = torch.rand(tokens, generator=g) < 0.3
            padding = mask if padding_dtype == torch.bool else torch.where(mask, -1, 5)
        for layer, given in zip(made.layers, ids, strict=True):
            layer.add(given.to("cuda", dtype), None if padding is None else padding.cuda())
        expected.add(number, ids, padding)
    torch.cuda.synchronize()
    expected.check(made, 200)


def test_graphs(tmp_path: Path) -> None:
    """Replayed with new inputs, and read meanwhile: what is read is never ahead of the routes."""
    experts, k, tokens, replays, capacity = 128, 8, 4, 400, 1500
    made, expected = recording(tmp_path, experts, k, capacity), Expected(experts)
    inputs = [torch.zeros(tokens, k, dtype=torch.int32, device="cuda") for _ in range(LAYERS)]
    mask = torch.zeros(tokens, dtype=torch.int64, device="cuda")

    def run() -> None:
        for layer, given in zip(made.layers, inputs, strict=True):
            layer.add(given, mask)

    run()  # a warm-up, as of an engine
    torch.cuda.synchronize()
    made.begin()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    g = torch.Generator().manual_seed(1)
    for number in range(replays):
        ids = random_ids(tokens, experts, k, g)
        padding = torch.where(torch.rand(tokens, generator=g) < 0.2, -1, 3)
        expected.add(number, ids, padding)
        for given, new in zip(inputs, ids, strict=True):
            given.copy_(new)
        mask.copy_(padding)
        graph.replay()
        if number % 50 == 0:
            read = made.routes().routes.tolist()
            assert read == expected.tokens[: len(read)]
    torch.cuda.synchronize()
    expected.check(made, capacity)
    made.save()
    assert (tmp_path / "stats").exists() and (tmp_path / "routes").exists()
