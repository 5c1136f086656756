"""Thread pools: how many threads on which NUMA nodes, and the teams that run them."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .machine import machine_key, usable_cores
from .machine_cache import measured_once
from .variant import debug, native

MAX_THREADS = 4096
MAX_POOLS = 64
# Shares of a bandwidth:
_GOOD_ENOUGH = 0.97  # of the best one, that a thread count must reach
_COULD_BE_CHOSEN = 0.85  # of the best one, below which noise does not decide
_SAME = 0.90  # of one pass, that another one must reach
_MANY_CORES = 12  # from which some are left to an engine's processes that take turns


@dataclass(frozen=True)
class PoolPlan:
    """Threads and NUMA node of each pool; the key under which teams are shared.

    ``reserves``: how many of a pool's threads sit out decoding.
    """

    threads: tuple[int, ...]
    nodes: tuple[int, ...]
    reserves: tuple[int, ...]

    @property
    def in_decode(self) -> tuple[int, ...]:
        """Threads of each pool that decode."""
        pairs = zip(self.threads, self.reserves, strict=True)
        return tuple(threads - reserves for threads, reserves in pairs)

    def describe(self) -> str:
        """Such as ``7+7 (6+6 in decode) on NUMA nodes 0,1``."""
        decode = f" ({_plus(self.in_decode)} in decode)" if any(self.reserves) else ""
        return f"{_plus(self.threads)}{decode} on NUMA nodes {','.join(map(str, self.nodes))}"


def _plus(counts: Sequence[int]) -> str:
    return "+".join(map(str, counts))


def plan_pools(
    cpuinfer_threads: int | None,
    threadpool_count: int | None,
    numa_nodes: Sequence[int] | None,
) -> PoolPlan:
    """Distributes threads over pools and pools over NUMA nodes.

    Args:
        cpuinfer_threads: total over all pools, the remainder to the first ones, all of which run
            every pass; None: the count that saturates the read bandwidth, probed once; where the
            process uses a CUDA device already, at most two less than there are cores, and from 12
            cores on at most four less in decode: the others are reserves.
        threadpool_count: pools; None: the length of ``numa_nodes``, else one per node in use (at
            most one per thread). More pools than nodes are legal, the nodes are then repeated.
        numa_nodes: node of each pool.

    Raises:
        ValueError: a count out of range, fewer threads than pools, a node that does not exist,
            or as many nodes as there are not pools.

    Warns:
        RuntimeWarning: more threads than usable cores, once per process for each number.
    """
    nodes = native().topology()
    available, cores = [node for node, _, _ in nodes], usable_cores(nodes)
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
        pools = min(len(available), cpuinfer_threads or cores)
    threads = cpuinfer_threads
    reserves = 0
    if threads is None:
        threads, reserves = _default_threads(cores, pools)
    if threads < pools:
        raise ValueError(
            f"cpuinfer_threads={threads} is less than threadpool_count={pools}; every pool needs "
            "a thread"
        )
    if threads > cores:
        _warn(too_many_threads(threads, pools, _reserved(cores)))
    per_pool, in_decode = _spread(threads, pools), _spread(threads - reserves, pools)
    return PoolPlan(
        threads=per_pool,
        nodes=tuple(numa_nodes or (available[pool % len(available)] for pool in range(pools))),
        reserves=tuple(a - b for a, b in zip(per_pool, in_decode, strict=True)),
    )


def _default_threads(cores: int, pools: int) -> tuple[int, int]:
    """All threads, and how many of them are reserves."""
    threads, in_decode = default_thread_count(cores), cores
    if torch.cuda.is_initialized():
        threads = min(threads, cores - native().beside_team)
        in_decode = cores - _cores_beside_decode(cores)
    threads = max(threads, pools)
    return threads, max(threads - max(in_decode, pools), 0)


def _spread(threads: int, pools: int) -> tuple[int, ...]:
    share, rest = divmod(threads, pools)
    return tuple(share + (pool < rest) for pool in range(pools))


def _check(name: str, count: int | None, most: int) -> None:
    if count is not None and not 1 <= count <= most:
        raise ValueError(f"{name}={count}; accepted: 1 to {most}, or None")


def too_many_threads(threads: int, pools: int = 1, reserved: int = 0) -> str | None:
    """One line on so many threads if they do not fit the usable cores, else None.

    reserved: cores that other threads of this process need, to serve a GPU.
    """
    cores = usable_cores()
    fits = cores - reserved if cores > reserved else cores
    if threads <= fits:
        return None
    names = "--kt-cpuinfer (cpuinfer_threads)"
    if pools > fits:
        names += " and with --kt-threadpool-count (threadpool_count)"
    harm = (
        "wait for each other, and a step may take many times as long"
        if threads > cores
        else "leave too few for the threads that serve the GPU, which makes steps slower"
    )
    return (
        f"{threads} CPU threads on {cores} usable core{'s' * (cores > 1)} {harm}; give at most "
        f"{fits} with {names}, or leave it out"
    )


_warned: set[str] = set()
_logged = False


def _warn(line: str | None) -> None:
    """A RuntimeWarning at the caller of this package. Only once, although layers are made one by
    one: Python forgets what it has shown whenever any code changes the filters."""
    if line is None or line in _warned:
        return
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == "kt_kernel":
        frame, level = frame.f_back, level + 1
    warnings.warn(line, RuntimeWarning, stacklevel=level)
    _warned.add(line)  # not where a filter made it an error


def log_once(logger: logging.Logger, line: str | None) -> None:
    """Logs what `too_many_threads` says, once per process."""
    global _logged
    if line is not None and not _logged:
        _logged = True
        logger.warning("kt: %s", line)


def log_crowding(logger: logging.Logger) -> None:
    """Logs, once per process, that the teams in use have more threads than fit the cores."""
    with _teams_lock:
        plans = list(_teams)
    for plan in plans:
        reserved = _reserved(usable_cores())
        log_once(logger, too_many_threads(sum(plan.in_decode), len(plan.threads), reserved))


def cores_for_serving(cores: int) -> int:
    """How many of ``cores`` the decoding threads must leave to an engine with a GPU.

    Two threads spin beside the team: the engine's scheduler and the thread that hands batches over.
    From 12 cores on, a third core serves the processes that take turns (tokenizer, detokenizer,
    HTTP server). Without it they interrupt the team: on 16 cores, 14 threads decoded at 85% of the
    speed of 13, and single rounds at 63%.
    """
    return native().beside_team + (cores >= _MANY_CORES)


def _cores_beside_decode(cores: int) -> int:
    """How many the default leaves: one more.

    Decoding is bound by memory bandwidth: on 16 cores, 12 threads decode at 96% of the speed of 13,
    but no round of 20 was below 89% of the median. Prompts are bound by the cores, and there the
    reserves count: 14 threads are 2 to 13% faster than 13.
    """
    return cores_for_serving(cores) + (cores >= _MANY_CORES)


def _reserved(cores: int) -> int:
    return cores_for_serving(cores) if torch.cuda.is_initialized() else 0


_teams: weakref.WeakValueDictionary[PoolPlan, Any] = weakref.WeakValueDictionary()
_teams_lock = threading.Lock()


def get_team(plan: PoolPlan) -> Any:
    """The team with exactly these settings. Its threads end when nobody keeps it any more."""
    with _teams_lock:
        team = _teams.get(plan)
        if team is None:
            team = native().Team(list(plan.threads), list(plan.nodes), list(plan.reserves))
            _teams[plan] = team
            debug(f"threads {plan.describe()}")
        return team


def _renew_lock_after_fork() -> None:
    global _teams_lock
    _teams_lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock_after_fork)


def default_thread_count(limit: int) -> int:
    """Fewest threads, 1 to ``limit``, that read memory within 3% of the best bandwidth.

    The probe takes about a second; `machine_cache` keeps its result.
    """
    if limit == 1:
        return 1
    return measured_once(
        "threads.json",
        machine_key(),
        lambda entry: entry if type(entry) is int and 1 <= entry <= limit else None,
        lambda: _probe(limit),
    )


def _probe(limit: int) -> tuple[int, str | None]:
    """The thread count of two passes together, and where they disagree."""
    one, other = (dict(native().probe_read_bandwidth(limit)) for _ in range(2))
    together = {count: max(one[count], other[count]) for count in one}  # noise only slows down
    top = max(together.values())
    doubt = None
    for count, bandwidth in together.items():
        slower = min(one[count], other[count])
        if bandwidth >= _COULD_BE_CHOSEN * top and slower < _SAME * bandwidth:
            doubt = (
                f"{count} threads read {slower / 1e9:.1f} GB/s in one pass and "
                f"{bandwidth / 1e9:.1f} GB/s in another"
            )
    return fewest_threads(list(together.items())), doubt


def fewest_threads(bandwidths: Sequence[tuple[int, float]]) -> int:
    """The smallest thread count whose bandwidth is within 3% of the best one."""
    best = max(bandwidth for _, bandwidth in bandwidths)
    return min(count for count, bandwidth in bandwidths if bandwidth >= _GOOD_ENOUGH * best)
