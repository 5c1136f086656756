"""Files of statistics and routes, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from kt_kernel.routes.heat_map import experts_for, heat_map
from kt_kernel.routes.load import statistics_of
from kt_kernel.routes.model import RoutedModel
from kt_kernel.routes.record import RouteRecord
from kt_kernel.routes.statistics import ExpertStatistics, merge

MODEL = RoutedModel("qwen3_moe", 4, 3, 2, 16, 8, "org/model")
STATISTICS = ExpertStatistics(
    MODEL, (0, 2), np.array([[4.0, 0, 2], [1, 1, 4]]), np.array([3.0, 3.0])
)
RECORD = RouteRecord(
    MODEL,
    (0, 2),
    np.array([[[0, 2], [2, 1]], [[0, -1], [2, 0]]], np.int16),
    np.array([7, 8]),
)


def test_statistics_come_back(tmp_path: Path) -> None:
    STATISTICS.save(tmp_path / "file")
    found = ExpertStatistics.load(tmp_path / "file")
    assert (found.model, found.model.name) == (MODEL, "org/model") and found.layers == (0, 2)
    assert np.array_equal(found.counts, STATISTICS.counts)
    assert np.array_equal(found.tokens, STATISTICS.tokens)
    assert found.frequencies[0].tolist() == [4 / 3, 0, 2 / 3]
    # The documented format.
    with safe_open(tmp_path / "file", "np") as file:
        assert file.metadata()["kind"] == "kt-expert-statistics"
        assert sorted(file.keys()) == ["counts", "layers", "tokens"]


def test_records_come_back_and_count_as_statistics(tmp_path: Path) -> None:
    RECORD.save(tmp_path / "file")
    found = RouteRecord.load(tmp_path / "file")
    assert found.model == MODEL and found.layers == (0, 2)
    assert np.array_equal(found.routes, RECORD.routes) and found.passes.tolist() == [7, 8]
    counted = statistics_of(tmp_path / "file")
    assert counted.counts.tolist() == [[2, 0, 1], [1, 1, 2]] and counted.tokens.tolist() == [2, 2]


def changed(path: Path, change: Callable[[dict[str, Any], dict[str, str]], None]) -> None:
    tensors = load_file(path)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    change(tensors, metadata)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (ExpertStatistics, lambda t, m: t.pop("counts"), "no tensor 'counts'"),
        (
            ExpertStatistics,
            lambda t, m: t.update(counts=t["counts"].astype(np.float32)),
            r"counts is float32 \[2, 3\]; expected float64 \[L, E\]",
        ),
        (ExpertStatistics, lambda t, m: t.update(counts=t["counts"] * np.nan), "must be finite"),
        (ExpertStatistics, lambda t, m: m.update(version="2"), "version 2; expected kt-expert-st"),
        (ExpertStatistics, lambda t, m: m.pop("model"), "its metadata names no model"),
        (ExpertStatistics, lambda t, m: m.update(model="{}"), "description of the model is inval"),
        (ExpertStatistics, lambda t, m: m.update(model=100_000 * "["), "description of the model"),
        (
            ExpertStatistics,
            lambda t, m: m.update(model=replace(MODEL, num_experts=4).to_json()),
            "counts of 3 experts, but the model has 4",
        ),
        (RouteRecord, lambda t, m: t["routes"].fill(3), "routes must be -1 to 2"),
        (RouteRecord, lambda t, m: t.update(passes=np.array([8, 7])), "passes must ascend"),
        (RouteRecord, lambda t, m: t.update(layers=np.array([2, 0])), "must ascend from 0 on"),
        (RouteRecord, lambda t, m: t.update(passes=np.array([1])), "has shape .*must be the same"),
    ],
)
def test_spoilt_files(kind: Any, change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    (STATISTICS if kind is ExpertStatistics else RECORD).save(path)
    changed(path, change)
    with pytest.raises(ValueError, match=message) as caught:
        kind.load(path)
    assert str(path) in str(caught.value)


def test_merge() -> None:
    other = replace(STATISTICS, layers=(2, 3), tokens=np.array([10.0, 20.0]))
    found = merge([STATISTICS, other], ["a", "b"])
    assert found.layers == (0, 2, 3) and found.tokens.tolist() == [3, 13, 20]
    assert found.counts.tolist() == [[4, 0, 2], [5, 1, 6], [1, 1, 4]]
    older = merge([STATISTICS] * 3, ["a", "b", "c"], decay=0.5)
    assert np.array_equal(older.counts, 1.75 * STATISTICS.counts)
    foreign = replace(STATISTICS, model=replace(MODEL, hidden_size=32, name="org/b"))
    with pytest.raises(ValueError, match=r"^b is of org/b .*: hidden_size 32 instead of 16$"):
        merge([STATISTICS, foreign], ["a", "b"])
    for decay in (0, 1.5):
        with pytest.raises(ValueError, match=f"decay {decay}: expected more than 0 and at most 1"):
            merge([STATISTICS], ["a"], decay)


def test_heat_map() -> None:
    """By hand: a layer's mean is 2, so 4 is twice as much."""
    lines = heat_map(STATISTICS).splitlines()
    assert lines[0] == "org/model (qwen3_moe, 4 layers, 3 experts): 3 tokens"
    assert lines[-2:] == ["    0  ▓ ▒     1     1", "    2  ░░▓     1     0"]
    wide = replace(
        STATISTICS,
        model=replace(MODEL, num_experts=130),
        counts=np.ones((2, 130)),
    )
    rows = heat_map(wide, columns=64).splitlines()
    assert "A character is the mean of 3 experts" in rows[1] and "▒" * 44 + "  " in rows[-1]


def test_experts_for() -> None:
    assert experts_for(np.array([1.0, 5, 4]), 0.5) == 1
    assert experts_for(np.array([1.0, 5, 4]), 0.51) == 2
    assert experts_for(np.array([2.0, 2, 2]), 1) == 3 and experts_for(np.zeros(3), 0.5) == 0
