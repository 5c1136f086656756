"""The CPUs that this process may use, and how busy other processes keep them."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from .text import ranges
from .variant import native

# Fractions of the time of all allowed CPUs.
_MOST_BUSY = 0.10  # that other processes may use during a measurement
_MOST_STOLEN = 0.02  # that the host of a virtual machine may take
_TICK = 0.01  # resolution of /proc/stat in seconds


def allowed_cpus() -> list[int]:
    """Numbers of the CPUs in this thread's affinity mask, ascending; all CPUs if a sandbox forbids
    reading it, as in the compiled core."""
    try:
        return sorted(os.sched_getaffinity(0))
    except OSError:
        return list(range(os.cpu_count() or 1))


def usable_cores(nodes: Sequence[tuple[int, int, int]] | None = None) -> int:
    """Cores that this process may run on, bounded by its CPU quota.

    nodes: (NUMA node, allowed CPUs, allowed cores), if already known.
    """
    core = native()
    if nodes is None:
        nodes = core.topology()
    return max(1, min(sum(cores for _, _, cores in nodes), core.cpu_quota()))


@functools.cache
def cpu_model() -> str:
    """The CPU's name, family, model and stepping: names of virtual CPUs are not specific."""
    numbers = {}
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(":")
            if not name.strip():
                break  # all processors are alike
            numbers[name.strip()] = value.strip()
    version = "-".join(numbers.get(n, "") for n in ("cpu family", "model", "stepping"))
    return f"{native().cpu_brand()} {version}"


def machine_key() -> str:
    """Everything that measurements depend on: the package's version, the CPU, the NUMA nodes with
    their allowed CPUs and cores, the numbers of the allowed CPUs, and the CPU quota."""
    return _machine_key(tuple(allowed_cpus()), os.environ.get("KT_TOPOLOGY"))


@functools.cache
def _machine_key(cpus: tuple[int, ...], topology: str | None) -> str:
    """topology: an additional input of native().topology()."""
    core = native()
    found = core.topology()
    nodes = " ".join(f"{node}:{count}/{cores}" for node, count, cores in found)
    quota = min(core.cpu_quota(), sum(count for _, count, _ in found))
    return f"kt-moe {_version()}, {cpu_model()}, CPUs {ranges(cpus)}, nodes {nodes}, quota {quota}"


@functools.cache
def _version() -> str:
    try:
        return metadata.version("kt-moe")
    except metadata.PackageNotFoundError:  # a source tree on the path, not installed
        return "uninstalled"


def last_level_cache() -> int:
    """Bytes of the caches of the highest level that the allowed CPUs use; 0 if unknown."""
    found: dict[tuple[int, str], int] = {}  # (level, CPUs that share it): bytes
    for cpu in allowed_cpus():
        for cache in Path("/sys/devices/system/cpu").glob(f"cpu{cpu}/cache/index*"):
            try:
                size = (cache / "size").read_text().strip()
                key = int((cache / "level").read_text()), (cache / "shared_cpu_list").read_text()
                found[key] = int(size.rstrip("KM")) << (20 if size.endswith("M") else 10)
            except (OSError, ValueError):
                continue
    top = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == top)


def available_memory() -> int:
    """Bytes of memory that are free or can be freed, within the limits of this process's control
    groups, such as a container's.

    Raises OSError if the system does not tell.
    """
    return min(_meminfo("MemAvailable"), *(left for _, left in _groups()))


def most_memory() -> int:
    """Bytes of memory and swap that this process can have at most, whatever else runs.

    Raises OSError if the system does not tell.
    """
    swap = _meminfo("SwapTotal")
    return min(_meminfo("MemTotal"), *(limit for limit, _ in _groups())) + swap


def _meminfo(name: str) -> int:
    """Bytes, from a line of /proc/meminfo. OSError if it is missing."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/meminfo: {name} is missing")


def _groups(root: Path = Path("/")) -> Iterator[tuple[int, int]]:
    """The limit of each control group, of version 2 or 1, and what it leaves, in bytes; at first
    2^63 for both, as unlimited groups have none."""
    yield 1 << 63, 1 << 63
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        mounted, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        if "memory" in controllers.split(","):
            mounted /= "memory"
            files = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        elif controllers:
            continue
        # A container's own group is mounted at the top, whatever path it has outside.
        inner = mounted / group.lstrip("/")
        for folder in (inner, *inner.parents):
            if not folder.is_relative_to(mounted):
                break
            with contextlib.suppress(OSError, ValueError):
                limit, used = (int((folder / name).read_text()) for name in files[:2])
                left = limit - used + _counted(folder / "memory.stat", files[2])
                yield limit, max(left, 0)


def _counted(statistics: Path, name: str) -> int:
    """A value of a control group's memory.stat; 0 if it is missing."""
    with contextlib.suppress(OSError):
        for line in statistics.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0


@dataclass(frozen=True)
class CpuTimes:
    """Seconds since the system started, summed over the allowed CPUs. busy: in use. stolen: taken
    by the host of a virtual machine. own: used by this process. at: time of the reading (monotonic
    clock)."""

    busy: float
    stolen: float
    own: float
    at: float


def cpu_times() -> CpuTimes:
    """The times until now; zeros if the system does not report them."""
    busy, stolen = 0.0, 0.0
    with contextlib.suppress(OSError, ValueError), open("/proc/stat", encoding="ascii") as file:
        busy, stolen = sum_times(file, allowed_cpus())
    return CpuTimes(busy, stolen, time.process_time(), time.monotonic())


def sum_times(lines: Iterable[str], cpus: Sequence[int]) -> tuple[float, float]:
    """(busy, stolen) of the CPUs in seconds, from the lines of /proc/stat (proc_stat(5))."""
    names, busy, stolen = {f"cpu{number}" for number in cpus}, 0, 0
    for line in lines:
        name, *fields = line.split()
        if name in names:
            user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
            busy += user + nice + system + irq + softirq
            stolen += steal
    return busy * _TICK, stolen * _TICK


def disturbance(before: CpuTimes, after: CpuTimes, cpus: int) -> str | None:
    """Describes the load by others on ``cpus`` CPUs between two times; None if it was low."""
    available = cpus * (after.at - before.at)
    uncertain = 2 * cpus * _TICK  # each counter may be a tick off at either end
    others = after.busy - before.busy - (after.own - before.own)
    stolen = after.stolen - before.stolen
    if others > _MOST_BUSY * available + uncertain:
        return f"other processes used {others / available:.0%} of the CPUs during the measurement"
    if stolen > _MOST_STOLEN * available + uncertain:
        return f"the host took {stolen / available:.0%} of the CPUs during the measurement"
    return None
