"""Shared by all tests. Keeps the user's environment and cache out, and orders the tests."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lanes import engine_of

for _name in (
    "KT_KERNEL_CPU_VARIANT",
    "KT_KERNEL_KIND",
    "KT_KERNEL_DEBUG",
    "KT_TRACE",
    "KT_CONFIG",
    "KT_STATS_FILE",
    "KT_TOPOLOGY",
    "KT_WATCHDOG_SECONDS",
):
    os.environ.pop(_name, None)

# A shell starts background jobs with SIGINT ignored, and processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# OpenMP's threads spin for milliseconds while they wait. If processes or thread pools share a few
# CPUs, as tests and the engines that they start do, that takes most of the time. Here they sleep,
# and workers of pytest-xdist get their share of threads. torch reads both variables when it is
# imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _workers > 1:
    _share = max(1, len(os.sched_getaffinity(0)) // _workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(_share))

# Without a GPU, our GPU kernels run in Triton's interpreter. Triton reads the variable when a
# function is decorated, including those of its own library, so it is set before anything imports
# Triton (transformers does). Processes started by tests inherit it, and start sooner without
# importing torch.
if "TRITON_INTERPRET" not in os.environ:
    import torch

    os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[1] / "benchmarks")

    def load(name: str) -> ModuleType:
        return __import__(name)

    return load


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Fails tests that leave a signal's handler behind, which others would run with."""
    watched = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in watched]
    yield
    assert [signal.getsignal(number) for number in watched] == before, watched


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Provides a cache that has the default number of threads. Tests keep the machine busy, so
    every process that they start would measure that number and not keep it. And an empty folder
    for what `kt tune` saves."""
    from kt_kernel.runtime.machine import machine_key, usable_cores

    folder = tmp_path_factory.mktemp("cache")
    (folder / "kt-moe").mkdir()
    (folder / "kt-moe" / "threads.json").write_text(json.dumps({machine_key(): usable_cores()}))
    os.environ["XDG_CACHE_HOME"] = str(folder)
    os.environ["XDG_CONFIG_HOME"] = str(folder / "config")


# ---- The order of the tests, and which run at the same time.

LONGEST = (
    "test_benchmarks.py",
    "test_sanitized.py",
    "test_stream_sanitized.py",
    "test_sys.py",
    "test_threads.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts the longest tests first, so that they are not left over at the end."""

    def rank(item: pytest.Item) -> int:
        if engine_of(item.nodeid):
            return 0
        return 1 if item.path.name in LONGEST else 2

    items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadgroup, the tests of a file run in one worker. So do all tests that start an
    engine of the same kind, one after the other, because engines look for free ports at their
    start, and two of a kind may find the same one."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class OneOfEachEngine(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return engine_of(nodeid) or nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # keeps the order of pytest_collection_modifyitems
    return OneOfEachEngine(config, log)
