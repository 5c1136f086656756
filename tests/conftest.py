"""Shared by all tests: nothing from the user's environment or cache gets in, nothing out; and which
tests run beside which."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

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

# OpenMP's threads wait by spinning, for milliseconds. Where processes or thread pools share few
# CPUs, as tests and the engines that they start do, that takes most of the time: here they sleep,
# and workers of pytest-xdist have their share of threads. Both are read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _workers > 1:
    _share = max(1, len(os.sched_getaffinity(0)) // _workers)
    os.environ.setdefault("OMP_NUM_THREADS", str(_share))

# Without a GPU our kernels for it run in Triton's interpreter. Triton asks for it where a function
# is decorated, its own library included, so this comes before anything imports it (transformers
# does). Processes that tests start know it already: those that need no torch start sooner.
if "TRITON_INTERPRET" not in os.environ:
    import torch

    os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With the default number of threads in it: tests keep the machine busy, so every process that
    they start would measure it, and keep nothing."""
    from kt_kernel.runtime.machine import machine_key, usable_cores

    folder = tmp_path_factory.mktemp("cache")
    (folder / "kt-moe").mkdir()
    (folder / "kt-moe" / "threads.json").write_text(json.dumps({machine_key(): usable_cores()}))
    os.environ["XDG_CACHE_HOME"] = str(folder)


# ---- the order of the tests, and what runs side by side

ENGINES = ("vllm", "sglang")
LONGEST = (
    "test_benchmarks.py",
    "test_sanitized.py",
    "test_stream_sanitized.py",
    "test_sys.py",
    "test_threads.py",
)


def engine_of(nodeid: str) -> str | None:
    """The engine that a test starts, by the test's name."""
    if "tests/plugin/" in nodeid:
        for engine in ENGINES:
            if f"test_{engine}" in nodeid or f"[{engine}-" in nodeid:
                return engine
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first, or it would be left over when all else is done."""

    def rank(item: pytest.Item) -> int:
        if engine_of(item.nodeid):
            return 0
        return 1 if item.path.name in LONGEST else 2

    items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadgroup, the tests of a file run in one worker, and all that start an engine of
    one kind too, one after the other: when engines start they look for free ports, which another of
    their kind may find as well."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class OneOfEachEngine(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return engine_of(nodeid) or nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # the order is that of pytest_collection_modifyitems
    return OneOfEachEngine(config, log)
