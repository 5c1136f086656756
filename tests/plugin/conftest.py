"""The model that both engines serve, and the results of transformers for it."""

from __future__ import annotations

from pathlib import Path

import broken_checkpoint
import pytest
from tiny_model import Greedy, Reference, clear_prompts, make
from trained_adapter import TrainedAdapter, train


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(request.module.__name__.removeprefix("test_"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def incomplete(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return broken_checkpoint.write_without_a_matrix(
        model, tmp_path_factory.mktemp("incomplete") / "tiny"
    )


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="session")
def prompts(reference: Reference) -> list[list[int]]:
    return clear_prompts(reference)


@pytest.fixture(scope="session")
def greedy(reference: Reference, prompts: list[list[int]]) -> Greedy:
    return reference.greedy(prompts)


@pytest.fixture(scope="session")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedAdapter:
    return train(model, tmp_path_factory.mktemp("adapter"))
