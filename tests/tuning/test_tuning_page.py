"""docs/tuning.md has what the saved runs of benchmarks/tune.py measured."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "tune"
FIRST = RESULTS / "2026-11-30-vllm-h200-first.json"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def load(name: str) -> ModuleType:
        return __import__(name)

    return load


def test_tables_of_the_page(module: Any) -> None:
    page = (ROOT / "docs" / "tuning.md").read_text()
    for file in (FIRST,):
        found = module("tune_table").page(file)
        *rows, _, summary = found.splitlines()
        assert "\n".join(rows) in page, f"run python benchmarks/tune_table.py {file}"
        assert summary in " ".join(page.split()), summary
