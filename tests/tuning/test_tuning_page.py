"""docs/tuning.md: what saved runs of benchmarks/tune.py measured, and what is now predicted from
their rates."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "tune"
SECOND = RESULTS / "2026-11-30-vllm-h200.json"
FIRST = RESULTS / "2026-11-30-vllm-h200-first.json"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def load(name: str) -> ModuleType:
        return __import__(name)

    return load


def test_tables_of_the_page(module: Any) -> None:
    page = (ROOT / "docs" / "tuning.md").read_text()
    for file in (FIRST, SECOND):
        found = module("tune_table").page(file)
        *rows, _, summary = found.splitlines()
        assert "\n".join(rows) in page, f"run python benchmarks/tune_table.py {file}"
        assert summary in " ".join(page.split()), summary


def test_predictions_of_the_saved_rates(module: Any) -> None:
    """A change of the time model changes what the page says of it."""
    saved = json.loads(SECOND.read_text())
    found = module("tune").with_predictions(saved)
    for old, new in zip(saved["rows"], found["rows"], strict=True):
        for kind in ("step", "predicted_prefill"):
            assert new[kind] == pytest.approx(old[kind]), (old["configuration"], kind)
    assert found["worst_error"] == pytest.approx(saved["worst_error"])
