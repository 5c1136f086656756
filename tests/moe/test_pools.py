import logging
import os
import subprocess
import sys
import warnings
import weakref

import pytest

from kt_kernel.runtime import machine, machine_cache, pools
from kt_kernel.runtime.pools import PoolPlan, plan_pools


class FakeCore:
    """Two nodes of four cores; counts its probes."""

    beside_team = 2

    def __init__(self):
        self.probes = 0
        self.bandwidths = [{1: 10e9, 2: 19e9, 4: 29.5e9, 8: 30e9}]  # of the passes, in turn

    def topology(self):
        return [(0, 8, 4), (2, 8, 4)]

    def cpu_quota(self):
        return 1000

    def cpu_brand(self):
        return "Test CPU"

    def probe_read_bandwidth(self, most):
        self.probes += 1
        found = self.bandwidths[self.probes % len(self.bandwidths)]
        return [(count, bandwidth) for count, bandwidth in found.items() if count <= most]

    class Team:
        def __init__(self, threads, nodes, reserves):
            self.given = (threads, nodes, reserves)


@pytest.fixture
def core(monkeypatch, tmp_path, forget):
    made = FakeCore()
    monkeypatch.setattr(pools, "native", lambda: made)
    monkeypatch.setattr(machine, "native", lambda: made)
    monkeypatch.setattr(pools, "_teams", weakref.WeakValueDictionary())
    monkeypatch.setattr(pools, "_warned", set())
    monkeypatch.setattr(pools, "_logged", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine_cache, "disturbance", lambda *times: None)
    return made


@pytest.mark.parametrize(
    ("threads", "count", "nodes", "want_threads", "want_nodes"),
    [
        (7, 2, None, (4, 3), (0, 2)),
        (7, 3, None, (3, 2, 2), (0, 2, 0)),  # a pool more than nodes
        (5, None, None, (3, 2), (0, 2)),
        (1, None, None, (1,), (0,)),  # not two pools for one thread
        (3, None, [2, 2, 0], (1, 1, 1), (2, 2, 0)),
        (4, 1, [2], (4,), (2,)),
        (None, 1, None, (4,), (0,)),
        (None, 6, None, (1, 1, 1, 1, 1, 1), (0, 2, 0, 2, 0, 2)),
    ],
)
def test_plans(core, threads, count, nodes, want_threads, want_nodes):
    plan = plan_pools(threads, count, nodes)
    assert (plan.threads, plan.nodes) == (want_threads, want_nodes)


def test_not_two_pools_on_one_cpu(core, monkeypatch):
    """Two nodes, of which the quota leaves one CPU."""
    monkeypatch.setattr(core, "cpu_quota", lambda: 1)
    plan = plan_pools(None, None, None)
    assert (plan.threads, plan.nodes) == ((1,), (0,))


MANY = r"9 CPU threads on 8 usable cores wait for each other.*at most 8 with --kt-cpuinfer \(cpui"


def test_more_threads_than_cores_warn(core, caplog):
    """Once for all layers, also if the filters change between them; a line in the log as well."""
    with pytest.warns(RuntimeWarning, match=MANY) as seen:
        for _ in range(48):
            plan = plan_pools(9, 1, None)
            warnings.simplefilter("always")
    assert len(seen) == 1 and seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_pools(8, None, None)
        team = pools.get_team(plan)
    for _ in range(2):
        pools.log_crowding(logging.getLogger("test"))
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "kt: 9 CPU threads on 8 usable" in record.getMessage()
    assert team is pools.get_team(plan)


def test_more_pools_than_cores_warn(core, monkeypatch):
    monkeypatch.setattr(core, "cpu_quota", lambda: 2)
    with pytest.warns(RuntimeWarning, match=r"3 CPU.*2 usable.*and with --kt-threadpool-count"):
        plan_pools(None, 3, None)


def test_a_warning_that_is_an_error_is_not_forgotten(core):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(RuntimeWarning, match=MANY):
                plan_pools(9, None, None)


def test_nothing_is_logged_of_teams_that_fit(core, caplog):
    team = pools.get_team(plan_pools(8, None, None))
    pools.log_crowding(logging.getLogger("test"))
    assert not caplog.records and team is not None


def test_affinity_that_cannot_be_asked_for(core, monkeypatch):
    """A sandbox may forbid it: all CPUs count, as in the compiled core."""

    def denied(pid):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_getaffinity", denied)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert machine.allowed_cpus() == [0, 1, 2]
    assert sum(plan_pools(None, None, None).threads) == 4


@pytest.mark.parametrize(
    ("threads", "count", "nodes", "text"),
    [
        (1, 2, None, "cpuinfer_threads=1 is less than threadpool_count=2"),
        (0, None, None, "cpuinfer_threads=0; accepted: 1 to"),
        (4, 65, None, "threadpool_count=65; accepted: 1 to 64"),
        (4, 1, [1], r"numa_nodes contains 1; nodes in use here: \[0, 2\]"),
        (4, 2, [0], "1 entries for threadpool_count=2"),
        (4, None, [], "0 entries"),
    ],
)
def test_refusals(core, threads, count, nodes, text):
    with pytest.raises(ValueError, match=text):
        plan_pools(threads, count, nodes)


def test_teams_are_shared_by_equal_settings_only(core):
    a, b, c = plan_pools(4, 2, None), plan_pools(4, 2, [0, 2]), plan_pools(4, 2, [2, 0])
    team = pools.get_team(a)
    assert team is pools.get_team(b)
    assert team is not pools.get_team(c)


THREADS_END = """
import os, sys, time
sys.path.insert(0, {folder!r})
from moe_cases import Case

def threads(expected):
    for _ in range(200):  # the system lists a thread a little longer than it can be joined
        found = len(os.listdir("/proc/self/task")) - others
        if found == expected:
            break
        time.sleep(0.05)
    return found

case = Case(experts=2, k=1)
batch = case.batch(2)
case.reference(*batch)  # starts the threads of PyTorch
others = len(os.listdir("/proc/self/task"))
wrappers = [case.wrapper(cpuinfer_threads=11) for _ in range(2)]
wanted = wrappers[0].forward(*batch)
assert threads(11) == 11
del wrappers[0]
assert (wrappers[0].forward(*batch) == wanted).all() and threads(11) == 11
wrappers.clear()
assert threads(0) == 0, threads(0)
assert (case.wrapper(cpuinfer_threads=11).forward(*batch) == wanted).all()
"""


def test_threads_end_with_the_last_wrapper_of_their_team():
    code = THREADS_END.format(folder=os.path.dirname(__file__))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_fewest_threads_within_three_percent():
    assert pools.fewest_threads([(1, 50.0), (2, 97.0), (4, 100.0), (8, 80.0)]) == 2
    assert pools.fewest_threads([(1, 50.0), (2, 96.9), (4, 100.0)]) == 4


def test_probe_is_kept(core, forget):
    assert pools.default_thread_count(8) == 4 and core.probes == 2
    forget()
    assert pools.default_thread_count(8) == 4 and core.probes == 2


def test_this_machine(tmp_path, monkeypatch, forget):
    """The real probe; whether its result is kept depends on what else runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cores = pools.usable_cores()
    found = pools.default_thread_count(cores)
    assert 1 <= found <= cores
    for _, key, entry in machine_cache.entries():
        assert (key, entry) == (machine.machine_key(), found)


@pytest.mark.parametrize("value", [0, 99, True, "4", None, 2.0])
def test_absurd_kept_counts_are_probed_again(core, forget, tmp_path, value):
    pools.default_thread_count(8)
    (key,) = machine_cache.read_cache(tmp_path / "kt-moe" / "threads.json")
    machine_cache.replace_file(
        tmp_path / "kt-moe" / "threads.json", machine_cache.json.dumps({key: value})
    )
    forget()
    assert pools.default_thread_count(8) == 4 and core.probes == 4


@pytest.mark.parametrize(
    ("change", "threads", "kept"),
    [
        ({4: 27e9}, 4, True),  # 8% less
        ({4: 25e9}, 4, False),
        ({8: 26e9}, 4, False),
        ({8: 33e9}, 8, True),  # near enough, although each pass alone says another count
        ({1: 2e9}, 4, True),  # far from being chosen either way
    ],
)
def test_a_probe_that_disagrees_with_itself_is_not_kept(core, forget, change, threads, kept):
    """The better pass counts for this process: a busy machine is slower, never faster."""
    core.bandwidths = [core.bandwidths[0], core.bandwidths[0] | change]
    assert pools.default_thread_count(8) == threads == pools.default_thread_count(8)
    assert core.probes == 2
    forget()
    assert pools.default_thread_count(8) == threads
    assert core.probes == (2 if kept else 4)


@pytest.mark.parametrize(("cores", "left"), [(1, 2), (11, 2), (12, 3), (128, 3)])
def test_cores_left_to_an_engine(core, cores, left):
    assert pools.cores_for_serving(cores) == left


@pytest.mark.parametrize(
    ("cores", "measured", "count", "threads", "in_decode"),
    [
        (11, 11, 1, (9,), (9,)),
        (12, 12, 1, (10,), (8,)),
        (16, 16, 1, (14,), (12,)),
        (16, 13, 1, (13,), (12,)),
        (16, 8, 1, (8,), (8,)),
        (16, 16, 2, (7, 7), (6, 6)),
        (16, 13, 2, (7, 6), (6, 6)),
        (16, 16, 4, (4, 4, 3, 3), (3, 3, 3, 3)),
        (16, 16, 5, (3, 3, 3, 3, 2), (3, 3, 2, 2, 2)),
        (16, 16, 13, (2,) + (1,) * 12, (1,) * 13),
        (16, 16, 20, (1,) * 20, (1,) * 20),
        (128, 128, 2, (63, 63), (62, 62)),
    ],
)
@pytest.mark.filterwarnings("ignore:20 CPU threads on 16 usable cores:RuntimeWarning")
def test_some_threads_sit_out_decoding_beside_a_gpu(
    core, monkeypatch, cores, measured, count, threads, in_decode
):
    monkeypatch.setattr(core, "topology", lambda: [(0, 2 * cores, cores)])
    monkeypatch.setattr(pools, "default_thread_count", lambda limit: measured)
    monkeypatch.setattr(pools.torch.cuda, "is_initialized", lambda: True)
    plan = plan_pools(None, count, None)
    assert (plan.threads, plan.in_decode) == (threads, in_decode)
    assert plan.reserves == tuple(a - b for a, b in zip(threads, in_decode, strict=True))
    assert pools.get_team(plan).given == (
        list(threads),
        [0] * count,
        list(plan.reserves),
    )
    assert sum(plan_pools(min(cores, 16), 1, None).reserves) == 0  # what is given decodes, too
    monkeypatch.setattr(pools.torch.cuda, "is_initialized", lambda: False)
    assert sum(plan_pools(None, count, None).reserves) == 0


def test_the_default_beside_a_gpu_is_not_warned_about(core, monkeypatch, caplog):
    monkeypatch.setattr(core, "topology", lambda: [(0, 32, 16)])
    monkeypatch.setattr(pools, "default_thread_count", lambda limit: limit)
    monkeypatch.setattr(pools.torch.cuda, "is_initialized", lambda: True)
    team = pools.get_team(plan_pools(None, None, None))
    pools.log_crowding(logging.getLogger("test"))
    assert not caplog.records and team.given[0] == [14]
    team = pools.get_team(plan_pools(14, None, None))
    pools.log_crowding(logging.getLogger("test"))
    (record,) = caplog.records
    assert "14 CPU threads on 16 usable cores leave too few" in record.getMessage()


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (PoolPlan((14,), (0,), (2,)), "14 (12 in decode) on NUMA nodes 0"),
        (PoolPlan((7, 6), (0, 2), (1, 0)), "7+6 (6+6 in decode) on NUMA nodes 0,2"),
        (PoolPlan((4, 3), (0, 2), (0, 0)), "4+3 on NUMA nodes 0,2"),
    ],
)
def test_plans_in_words(plan, text):
    assert plan.describe() == text


@pytest.mark.parametrize(
    ("measured", "threads"), [(1, (1, 1)), (5, (3, 2)), (7, (3, 3)), (8, (3, 3))]
)
def test_two_cores_are_left_beside_a_gpu(core, monkeypatch, measured, threads):
    """The threads that wait for it would take them from the CPU's."""
    monkeypatch.setattr(pools, "default_thread_count", lambda limit: measured)
    monkeypatch.setattr(pools.torch.cuda, "is_initialized", lambda: True)
    assert plan_pools(None, 2, None).threads == threads
    assert sum(plan_pools(8, 2, None).threads) == 8  # what is given counts
    monkeypatch.setattr(pools.torch.cuda, "is_initialized", lambda: False)
    assert sum(plan_pools(None, 2, None).threads) == max(measured, 2)
