"""kt model info --experts and kt model stats merge."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outcome import failed

from kt_kernel.routes.model import RoutedModel
from kt_kernel.routes.statistics import ExpertStatistics

MODEL = RoutedModel("qwen3_moe", 2, 3, 1, 16, 8, "org/model")
STATISTICS = ExpertStatistics(
    MODEL, (0, 1), np.array([[4.0, 0, 2], [1, 1, 4]]), np.array([6.0, 6.0])
)


def test_info(kt: Any, tmp_path: Path) -> None:
    STATISTICS.save(tmp_path / "stats")
    code, out, err = kt("model", "info", "--experts", tmp_path / "stats")
    assert (code, err) == (0, "") and "org/model" in out and out.count("\n") == 6


def test_info_as_a_picture(kt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    STATISTICS.save(tmp_path / "stats")
    given = "model", "info", "--experts", tmp_path / "stats", "--plot", tmp_path / "map.png"
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)
        failed(kt(*given), 1, "plots need matplotlib")
    pytest.importorskip("matplotlib")
    assert kt(*given)[0] == 0
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_merge(kt: Any, tmp_path: Path) -> None:
    for name in "ab":
        STATISTICS.save(tmp_path / name)
    a, b, c = (tmp_path / name for name in "abc")
    code, out, err = kt("model", "stats", "merge", a, b, "-o", c, "--decay", "0.5")
    assert (code, err) == (0, "")
    line = f"kt: {c}: 2 files, 2 layers, 9 tokens of org/model (qwen3_moe, 2 layers, 3 experts)\n"
    assert out == line
    assert np.array_equal(ExpertStatistics.load(c).counts, 1.5 * STATISTICS.counts)


def test_merge_of_different_models(kt: Any, tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    STATISTICS.save(a)
    replace(STATISTICS, model=replace(MODEL, model_type="olmoe", name="org/other")).save(b)
    result = kt("model", "stats", "merge", a, b, "-o", c)
    failed(result, 1, f"{b} is of org/other", "not of org/model", "model_type olmoe instead")
    assert not c.exists()
    failed(kt("model", "stats", "merge", a, "-o", tmp_path / "no" / "c"), 1, "does not exist")
    failed(kt("model", "stats", "merge", a, tmp_path / "none", "-o", c), 1, "none: No such file")
