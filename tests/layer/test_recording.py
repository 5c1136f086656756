"""Statistics and routes recorded while serving, on the CPU."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kt_kernel.routes.record import RouteRecord
from kt_kernel.routes.statistics import ExpertStatistics
from kt_kernel.serving import recording
from kt_kernel.serving.hybrid_model import HybridModel
from kt_kernel.serving.options import KTOptions
from kt_kernel.weights.expert_tensors import MATRICES, matrix_shapes

E, K, H, INNER, LAYERS = 6, 2, 32, 32, (1, 3)
CONFIG = SimpleNamespace(
    model_type="qwen3_moe",
    num_hidden_layers=4,
    decoder_sparse_step=2,
    num_experts=E,
    num_experts_per_tok=K,
    hidden_size=H,
    moe_intermediate_size=INNER,
)


def model_of(**options: Any) -> HybridModel:
    """A loaded model: of its two layers, one has all experts hot, if two are hot on average."""
    model = HybridModel(KTOptions.from_mapping({"method": "BF16", "cpuinfer": 1} | options), CONFIG)
    for layer_idx in LAYERS:
        layer = model.add_layer(
            layer_idx=layer_idx,
            num_experts=E,
            num_experts_per_tok=K,
            hidden_size=H,
            moe_intermediate_size=INNER,
        )
        for expert in layer.placement.cold_experts:
            for which in MATRICES:
                layer.add_weight(expert, which, torch.zeros(matrix_shapes(H, INNER)[which]))
        layer.finish_loading()
    model.finish_loading()
    recording.begin()
    return model


def serve(
    model: HybridModel,
    ids: list[torch.Tensor],
    padding: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> None:
    """One pass: the ids of each layer. weights: of the router in all layers; None: ones."""
    for layer, given in zip(model.layers, ids, strict=True):
        if weights is None:
            weights = torch.ones(len(given), K)
        if layer.placement.all_hot:
            layer.record(given, weights, padding)
            continue
        x = torch.zeros(len(given), H)
        layer.submit(x, given, weights, padding=padding)
        layer.collect(x, x.clone())


def passes(count: int) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """Ids of both layers, some of no expert, and the padding of each pass."""
    generator = torch.Generator().manual_seed(3)
    for number in range(count):
        tokens = 1 + number % 4
        ids = [torch.randint(-1, E + 1, (tokens, K), generator=generator) for _ in LAYERS]
        for given in ids:
            given[:, 0] = given[:, 0].clamp(0, E - 1)  # every row is a token in every layer
        padding = torch.zeros(tokens, dtype=torch.bool)
        padding[1:] = torch.rand(tokens - 1, generator=generator) < 0.3
        yield ids, padding


@pytest.mark.parametrize("hot", [0, 3], ids=["all cold", "a layer all hot"])
def test_files_have_what_was_served(hot: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_gpu_experts": hot}
    if hot:
        options["expert_placement_strategy"] = "front-loading"
    model = model_of(
        record_kt_gpu_expert_distribution=str(tmp_path / "stats"),
        record_kt_expert_routes=str(tmp_path / "routes"),
        expert_routes_tokens=7,
        **options,
    )
    assert [layer.placement.all_hot for layer in model.layers] == [hot == 3, False]
    counts, routes = np.zeros((2, E)), []
    for number, (ids, padding) in enumerate(passes(9)):
        serve(model, ids, padding)
        for row in (~padding).nonzero()[:, 0].tolist():
            token = []
            for layer, given in enumerate(ids):
                token.append([e if 0 <= e < E else -1 for e in given[row].tolist()])
                for expert in token[-1]:
                    if expert >= 0:
                        counts[layer, expert] += 1
            routes.append((number, token))
    del model
    gc.collect()  # the last write
    stats = ExpertStatistics.load(tmp_path / "stats")
    assert stats.layers == LAYERS and stats.model.num_experts == E
    assert np.array_equal(stats.counts, counts) and (stats.tokens == len(routes)).all()
    record = RouteRecord.load(tmp_path / "routes")
    assert len(routes) > 7 and record.routes.tolist() == [token for _, token in routes[:7]]
    assert record.passes.tolist() == [number for number, _ in routes[:7]]
    assert not recording._recordings


def test_routes_to_zero_experts_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all experts of a layer hot, too. The engines replace them by expert 0 at weight 0."""
    monkeypatch.setattr(CONFIG, "zero_expert_num", 2, raising=False)
    model = model_of(
        record_kt_gpu_expert_distribution=str(tmp_path / "stats"),
        num_gpu_experts=3,
        expert_placement_strategy="front-loading",
    )
    assert [layer.placement.all_hot for layer in model.layers] == [True, False]
    ids = torch.tensor([[0, 4], [0, 0]])
    serve(model, [ids, ids], weights=torch.tensor([[0.0, 1], [1, 0]]))
    del model
    gc.collect()
    counts = ExpertStatistics.load(tmp_path / "stats").counts
    assert counts.tolist() == [[1, 0, 0, 0, 1, 0]] * 2


def test_batches_of_the_start_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = recording.begin
    monkeypatch.setattr(recording, "begin", lambda: None)
    model = model_of(record_kt_gpu_expert_distribution=str(tmp_path / "stats"))
    assert model.recording is not None
    (first, _), (second, _) = passes(2)
    serve(model, first)
    model.recording.save()
    assert not (tmp_path / "stats").exists()
    begin()
    serve(model, second)
    del model
    gc.collect()
    assert ExpertStatistics.load(tmp_path / "stats").tokens.tolist() == [2, 2]


def test_files_are_written_while_serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LOOK_SECONDS", 0.02)
    path = tmp_path / "stats"
    model = model_of(record_kt_gpu_expert_distribution=str(path))
    serve(model, next(passes(1))[0])
    end = time.monotonic() + 20
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert ExpertStatistics.load(path).tokens.tolist() == [1, 1]
    del model


def test_a_rank_without_cpu_part_records_nothing(tmp_path: Path) -> None:
    options = KTOptions(method="BF16", record_kt_gpu_expert_distribution=str(tmp_path / "stats"))
    model = HybridModel(options, CONFIG)
    shape = dict(num_experts=E, num_experts_per_tok=K, hidden_size=H, moe_intermediate_size=INNER)
    layer = model.add_layer(layer_idx=1, has_cpu_part=False, **shape)
    assert not layer.recorded


def test_a_folder_that_is_gone_does_not_end_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    model = model_of(record_kt_gpu_expert_distribution=str(folder / "stats"))
    folder.rmdir()
    serve(model, next(passes(1))[0])
    assert model.recording is not None
    model.recording.save()
    assert "stats: cannot be written: No such file" in caplog.text


def test_another_engine_of_the_process_forgets_nothing(tmp_path: Path) -> None:
    """Its start begins the recordings of its own models only."""
    model = model_of(record_kt_gpu_expert_distribution=str(tmp_path / "counts"))
    ids = torch.arange(3 * K).view(3, K) % E
    serve(model, [ids] * len(LAYERS))
    recording.begin()
    assert model.recording is not None
    assert model.recording.statistics().tokens.tolist() == [3] * len(LAYERS)
