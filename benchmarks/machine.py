"""The machine: its CPU, caches and memory, and its ceilings, measured by roofline.cpp."""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

import kt_kernel
from kt_kernel import _C
from kt_kernel.runtime.machine import allowed_cpus, last_level_cache


def anonymous_memory() -> int:
    """Bytes of this process's anonymous memory that are in RAM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise OSError("/proc/self/status has no RssAnon")


def about() -> dict[str, Any]:
    return {
        "kt_moe": kt_kernel.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": _C.cpu_brand(),
        "cpus": len(allowed_cpus()),
        "cpu_quota": _C.cpu_quota(),
        "features": [f for f, on in _C.cpu_features().items() if on],
        "nodes": _C.topology(),
        "last_level_cache": last_level_cache(),
        "load_average": os.getloadavg()[0],
    }


def busy_note(load_average: float, cpus: int) -> str | None:
    """The note about other work on the machine at the start, if there was much."""
    if load_average <= cpus / 4:
        return None
    return (
        f"the machine was busy when this began (load {load_average:.1f} on {cpus} CPUs): shares "
        "are not to be quoted, and least of all ratios to kt-kernel, whose threads wait by spinning"
    )


class Ceilings:
    """Peaks of the units and memory bandwidths per thread count, in operations and bytes per
    second.

    Memory is measured on every request, because neighbours take part of it. The median is used, and
    all samples are kept to show drift. For the units, the best peak is used.
    """

    def __init__(self, mebibytes: int) -> None:
        self._mebibytes = mebibytes
        self._folder = tempfile.TemporaryDirectory()
        self._program = Path(self._folder.name) / "roofline"
        source = Path(__file__).with_name("roofline.cpp")
        subprocess.run(["g++", "-O3", "-fopenmp", source, "-o", self._program], check=True)
        self._units: dict[int, dict[str, float]] = {}
        self._memory: dict[int, dict[str, list[float]]] = {}

    def has(self, threads: int) -> bool:
        return threads in self._units

    def measure(self, threads: int) -> None:
        """Takes a sample of the memory and of the units."""
        self._sample(threads, "all")

    def measure_memory(self) -> None:
        """Takes a sample of the memory for every known thread count."""
        for threads in self._units:
            self._sample(threads, "memory")

    def measure_all(self) -> None:
        for threads in self._units:
            self._sample(threads, "all")

    def _sample(self, threads: int, what: str) -> None:
        found = self._run(threads, what)
        samples = self._memory.setdefault(threads, {"dram_read": [], "dram_copy": []})
        for name, values in samples.items():
            values.append(found.pop(name))
        units = self._units.setdefault(threads, {})
        for name, value in found.items():
            units[name] = max(value, units.get(name, 0.0))

    def of(self, threads: int) -> dict[str, float]:
        memory = {name: median(values) for name, values in self._memory[threads].items()}
        return {**memory, **self._units[threads]}

    def record(self) -> dict[str, Any]:
        return {
            str(threads): {**self.of(threads), "samples": self._memory[threads]}
            for threads in self._units
        }

    def _run(self, threads: int, what: str) -> dict[str, float]:
        text = subprocess.run(
            [self._program, str(self._mebibytes), what],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        ).stdout
        found = {}
        for line in text.splitlines():
            name, value, *unit = line.split()
            if unit:
                found[name] = float(value) * (1e9 if unit[0] == "GB/s" else 1e12)
        return found
