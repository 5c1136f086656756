"""The model both engines serve, and what transformers makes of it; and who runs beside whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_model import Greedy, Reference, clear_prompts, make

ENGINES = ("vllm", "sglang")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadgroup, engines of one kind run one after the other, in one worker: when they
    start they look for free ports, which another of their kind may find as well."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class OneOfEachEngine(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            for engine in ENGINES:
                if f"test_{engine}" in nodeid or f"[{engine}-" in nodeid:
                    return engine
            return nodeid

    return OneOfEachEngine(config, log)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(request.module.__name__.removeprefix("test_"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="session")
def prompts(reference: Reference) -> list[list[int]]:
    return clear_prompts(reference)


@pytest.fixture(scope="session")
def greedy(reference: Reference, prompts: list[list[int]]) -> Greedy:
    return reference.greedy(prompts)
