"""Shared by all tests: nothing from the user's environment or cache gets in, nothing out."""

from __future__ import annotations

import json
import os

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
    from kt_kernel.machine import machine_key, usable_cores

    folder = tmp_path_factory.mktemp("cache")
    (folder / "kt-moe").mkdir()
    (folder / "kt-moe" / "threads.json").write_text(json.dumps({machine_key(): usable_cores()}))
    os.environ["XDG_CACHE_HOME"] = str(folder)
