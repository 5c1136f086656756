"""Thread pools: how many threads on which NUMA nodes, and the teams that run them."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .machine_cache import cache_file, read_cache, write_cache
from .variant import debug, native

MAX_THREADS = 4096
MAX_POOLS = 64
_GOOD_ENOUGH = 0.97  # share of the best bandwidth that a thread count must reach


@dataclass(frozen=True)
class PoolPlan:
    """Threads and NUMA node of each pool; the key under which teams are shared."""

    threads: tuple[int, ...]
    nodes: tuple[int, ...]


def plan_pools(
    cpuinfer_threads: int | None,
    threadpool_count: int | None,
    numa_nodes: Sequence[int] | None,
) -> PoolPlan:
    """Distributes threads over pools and pools over NUMA nodes.

    Args:
        cpuinfer_threads: total over all pools, the remainder to the first ones; None: the count
            that saturates the read bandwidth, probed once; where the process uses a CUDA device
            already, two less than there are cores at most.
        threadpool_count: pools; None: the length of ``numa_nodes``, else one per node in use (at
            most one per thread). More pools than nodes are legal, the nodes are then repeated.
        numa_nodes: node of each pool.

    Raises:
        ValueError: a count out of range, fewer threads than pools, a node that does not exist,
            or as many nodes as there are not pools.
    """
    available = [node for node, _, _ in native().topology()]
    if numa_nodes is not None:
        numa_nodes = list(numa_nodes)
        for node in numa_nodes:
            if node not in available:
                raise ValueError(f"numa_nodes contains {node}; nodes in use here: {available}")
        if threadpool_count is None:
            threadpool_count = len(numa_nodes)
        if not numa_nodes or len(numa_nodes) != threadpool_count:
            raise ValueError(
                f"numa_nodes has {len(numa_nodes)} entries for threadpool_count="
                f"{threadpool_count}; one per pool is needed"
            )
    _check("threadpool_count", threadpool_count, MAX_POOLS)
    _check("cpuinfer_threads", cpuinfer_threads, MAX_THREADS)
    pools = threadpool_count
    if pools is None:
        pools = len(available)
        if cpuinfer_threads is not None:
            pools = min(pools, cpuinfer_threads)
    threads = cpuinfer_threads
    if threads is None:
        threads = max(default_thread_count(), pools)
        if torch.cuda.is_initialized():  # threads that wait for the device must not be in the way
            threads = max(min(threads, usable_cores() - native().beside_team), pools)
    if threads < pools:
        raise ValueError(
            f"cpuinfer_threads={threads} is less than threadpool_count={pools}; every pool needs "
            "a thread"
        )
    share, rest = divmod(threads, pools)
    return PoolPlan(
        threads=tuple(share + (pool < rest) for pool in range(pools)),
        nodes=tuple(numa_nodes or (available[pool % len(available)] for pool in range(pools))),
    )


def _check(name: str, count: int | None, most: int) -> None:
    if count is not None and not 1 <= count <= most:
        raise ValueError(f"{name}={count}; accepted: 1 to {most}, or None")


_teams: weakref.WeakValueDictionary[PoolPlan, Any] = weakref.WeakValueDictionary()
_teams_lock = threading.Lock()


def get_team(plan: PoolPlan) -> Any:
    """The team with exactly these settings. Its threads end when nobody keeps it any more."""
    with _teams_lock:
        team = _teams.get(plan)
        if team is None:
            team = native().Team(list(plan.threads), list(plan.nodes))
            _teams[plan] = team
            debug(f"threads per pool {plan.threads} on nodes {plan.nodes}")
        return team


def _renew_lock_after_fork() -> None:
    global _teams_lock
    _teams_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock_after_fork)


def usable_cores() -> int:
    """Cores that this process may run on, bounded by its CPU quota."""
    core = native()
    return max(1, min(sum(cores for _, _, cores in core.topology()), core.cpu_quota()))


@functools.cache
def default_thread_count() -> int:
    """Fewest threads within 3% of the best read bandwidth, bounded by cores and CPU quota.

    The probe takes about half a second; its result is kept in the user's cache folder, per CPU
    model and allowed CPUs.
    """
    core = native()
    limit = usable_cores()
    if limit == 1:
        return 1
    cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    key = f"{core.cpu_brand()}|{cpus}|{limit}"
    path = cache_file("threads.json")
    stored = read_cache(path)
    threads = stored.get(key)
    if isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= limit:
        debug(f"{threads} threads saturate the read bandwidth (from {path})")
        return threads
    threads = fewest_threads(core.probe_read_bandwidth(limit))
    debug(f"{threads} threads saturate the read bandwidth (measured)")
    write_cache(path, {**stored, key: threads})
    return threads


def fewest_threads(bandwidths: Sequence[tuple[int, float]]) -> int:
    """The smallest thread count whose bandwidth is within 3% of the best one."""
    best = max(bandwidth for _, bandwidth in bandwidths)
    return min(count for count, bandwidth in bandwidths if bandwidth >= _GOOD_ENOUGH * best)
