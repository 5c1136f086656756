import functools
import json
import os
import subprocess
import sys
import weakref

import pytest

from kt_kernel import machine_cache, pools
from kt_kernel.pools import plan_pools


class FakeCore:
    """Two nodes of four cores; counts its probes."""

    beside_team = 2

    def __init__(self):
        self.probes = 0

    def topology(self):
        return [(0, 8, 4), (2, 8, 4)]

    def cpu_quota(self):
        return 1000

    def cpu_brand(self):
        return "Test CPU"

    def probe_read_bandwidth(self, most):
        self.probes += 1
        return [(1, 10.0), (2, 19.0), (4, 29.5), (most, 30.0)]

    class Team:
        def __init__(self, threads, nodes):
            pass


@pytest.fixture
def core(monkeypatch, tmp_path):
    made = FakeCore()
    monkeypatch.setattr(pools, "native", lambda: made)
    monkeypatch.setattr(pools, "_teams", weakref.WeakValueDictionary())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pools.default_thread_count.cache_clear()
    yield made
    pools.default_thread_count.cache_clear()


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


def probe_again():
    pools.default_thread_count.cache_clear()
    return pools.default_thread_count()


def test_probe_is_cached_in_a_file(core, tmp_path):
    assert pools.default_thread_count() == 4
    file = tmp_path / "kt-moe" / "threads.json"
    assert [*json.loads(file.read_text()).values()] == [4]
    assert probe_again() == 4 and core.probes == 1
    assert os.listdir(file.parent) == ["threads.json"]  # no temporary file stays


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff", "[" * 100000])
def test_corrupt_cache_is_rewritten(core, tmp_path, content):
    file = tmp_path / "kt-moe" / "threads.json"
    file.parent.mkdir()
    file.write_bytes(content.encode("latin-1"))
    assert pools.default_thread_count() == 4
    assert probe_again() == 4 and core.probes == 1


@pytest.mark.parametrize("value", [0, 99, True, "4", None, 2.0])
def test_absurd_cached_value_is_probed_again(core, tmp_path, value):
    pools.default_thread_count()
    file = tmp_path / "kt-moe" / "threads.json"
    file.write_text(json.dumps(dict.fromkeys(json.loads(file.read_text()), value)))
    assert probe_again() == 4 and core.probes == 2


def test_no_writable_cache(core, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert pools.default_thread_count() == 4
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home():
        raise RuntimeError

    monkeypatch.setattr(machine_cache.Path, "home", no_home)
    assert probe_again() == 4


@pytest.mark.parametrize(
    ("measured", "threads"), [(1, (1, 1)), (5, (3, 2)), (7, (3, 3)), (8, (3, 3))]
)
def test_two_cores_are_left_beside_a_gpu(core, monkeypatch, measured, threads):
    """Those threads that wait for it would take them from the CPU's."""
    monkeypatch.setattr(pools, "default_thread_count", functools.cache(lambda: measured))
    monkeypatch.setattr(pools.torch.cuda, "is_initialized", lambda: True)
    assert plan_pools(None, 2, None).threads == threads
    assert sum(plan_pools(8, 2, None).threads) == 8  # what is given counts
    monkeypatch.setattr(pools.torch.cuda, "is_initialized", lambda: False)
    assert sum(plan_pools(None, 2, None).threads) == max(measured, 2)
