"""kt model info --experts, kt model stats merge and kt bench experts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from outcome import failed

from kt_kernel.routes.model import RoutedModel
from kt_kernel.routes.record import RouteRecord
from kt_kernel.routes.statistics import ExpertStatistics
from kt_kernel.routes.synthetic import QWEN3_30B, generate

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


def test_a_file_that_cannot_be_written_is_named_before_others_are_read(
    kt: Any, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    nowhere, none = tmp_path / "none" / "file", tmp_path / "not read"
    for given in (
        ("model", "info", "--experts", none, "--plot", nowhere),
        ("bench", "experts", none, "--plot", nowhere),
        ("model", "stats", "merge", none, "-o", nowhere),
    ):
        failed(kt(*given), 1, f"{nowhere}: No such file or directory")
    failed(kt("model", "stats", "merge", none, "-o", tmp_path), 1, "not a regular file")
    assert list(tmp_path.iterdir()) == []


def test_results_in_links_and_pipes(kt: Any, routes: Path, tmp_path: Path) -> None:
    """A link stays, and a pipe is written to, by every command with a file as its result."""
    pytest.importorskip("matplotlib")
    stats, file, link, pipe = (tmp_path / name for name in ("stats", "file", "link", "pipe"))
    STATISTICS.save(stats)
    link.symlink_to("file")
    os.mkfifo(pipe)
    for given in (
        ("model", "info", "--experts", stats, "--plot"),
        ("bench", "experts", routes, "--slots", "4", "--plot"),
        ("model", "stats", "merge", stats, "-o"),
    ):
        file.write_text("old")
        assert kt(*given, link)[0] == 0
        assert link.is_symlink() and file.stat().st_size > 100
        with open(tmp_path / "read", "wb") as out, subprocess.Popen(["cat", pipe], stdout=out) as p:
            assert kt(*given, pipe)[0] == 0
            assert p.wait(timeout=60) == 0
        # Names in the header of a safetensors file have no order.
        assert pipe.is_fifo()
        assert sorted((tmp_path / "read").read_bytes()) == sorted(file.read_bytes())


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
    failed(kt("model", "stats", "merge", a, tmp_path / "none", "-o", c), 1, "none: No such file")


# ---- kt bench experts


@pytest.fixture
def routes(tmp_path: Path) -> Path:
    record = generate(replace(QWEN3_30B, experts=16, per_token=2), tokens=60, layers=2)
    # A prompt, whose tokens share a pass, comes first.
    passes = np.array([0] * 20 + [*range(1, 41)])
    replace(record, passes=passes).save(tmp_path / "routes")
    return tmp_path / "routes"


def test_bench_experts(kt: Any, routes: Path) -> None:
    code, out, err = kt("bench", "experts", routes)
    assert (code, err) == (0, "")
    assert out.startswith("synthetic, 2 layers, 16 experts: 40 tokens in 2 layers; ")
    rows = [line.split(" | ") for line in out.splitlines() if line.startswith("| ")][2:]
    assert {int(row[0][2:]) for row in rows} == {2, 4, 6} and len(rows) == 3 * 12
    assert {row[3] for row in rows if row[1] == "Belady"} == {"100%"}
    code, out, _ = kt("bench", "experts", routes, "--slots", "3,16", "--json", "--prompts")
    found = json.loads(out)
    assert {(r["tokens"], r["uses"]) for r in found} == {(21, 84)}
    assert all(r["hits"] == 84 for r in found if r["slots"] == 16)


def test_bench_experts_with_streams_and_a_plot(kt: Any, routes: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = "--streams", 4, "--slots", 4, "--json", "--plot", tmp_path / "plot.png"
    code, out, _ = kt("bench", "experts", routes, *options)
    assert code == 0 and {r["tokens"] for r in json.loads(out)} == {20}
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_bench_experts_with_a_bound_on_uploads(kt: Any, routes: Path) -> None:
    options = "--slots", 4, "--uploads", 0, "--json"
    found = json.loads(kt("bench", "experts", routes, *options)[1])
    assert {r["uploads"] for r in found} == {0} and len(found) == 12
    (first,) = {r["hits"] for r in found if r["policy"] in ("first experts", "LRU", "Belady")}
    assert 0 < first < 80


def test_bench_experts_predicts_speed(kt: Any, routes: Path) -> None:
    given = "bench", "experts", routes, "--slots", "4", "--times", "1,0.5,0.25,0", "--bus-share", 1
    code, out, _ = kt(*given)
    rows = [line.split(" | ") for line in out.split("Predicted with 100%")[1].splitlines()][4:]
    assert code == 0 and [row[1] for row in rows] == [
        "first experts",
        "LRU",
        "decayed LFU, 3 tokens",
        "decayed LFU, 64 tokens",
    ]
    assert rows[0][6] == "1.00 |" and float(rows[1][6].rstrip("| ")) > 1
    found = json.loads(kt(*given, "--json")[1])
    first = found["predicted"][0]
    assert len(found["results"]) == 12 and first["result"] == found["results"][0]
    assert first["seconds"] == pytest.approx(1e-3 + 0.5e-3 * first["result"]["missed"] / 20)


def test_bench_experts_refuses(kt: Any, routes: Path, tmp_path: Path) -> None:
    failed(kt("bench", "experts", routes, "--slots", "many"), 1, "--slots many: expected numbers")
    failed(kt("bench", "experts", routes, "--slots", "17"), 1, "slots 17: expected 1 to 16")
    for times in ("1,2,3", "1,2,0,4", "1,-2,3,4", "1,nan,3,4", "1,2,inf,4", "fast"):
        failed(
            kt("bench", "experts", routes, "--times", times),
            1,
            f"--times {times}: expected four or",
        )
    failed(kt("bench", "experts", routes, "--times", ""), 1, "--times : expected four or")
    failed(
        kt("bench", "experts", routes, "--uploads", "inf"), 1, "--uploads inf: expected a number"
    )
    STATISTICS.save(tmp_path / "stats")
    failed(kt("bench", "experts", tmp_path / "stats"), 1, "expected kt-expert-routes")
    record = RouteRecord.load(routes)
    replace(record, passes=record.passes * 0).save(routes)
    failed(kt("bench", "experts", routes), 1, "0 of 60 tokens had a pass of their own", "--prompts")
    failed(kt("bench", "experts", routes, "--prompts"), 1, "1 passes: at least 2 are needed")
