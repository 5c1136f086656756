"""What was measured on a machine: when it is kept, who finds it, and what else may be there."""

import errno
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from kt_kernel.runtime import machine, machine_cache
from kt_kernel.runtime.file_lock import FileLock
from kt_kernel.runtime.machine_cache import measured_once

NAME = "threads.json"


@pytest.fixture
def folder(tmp_path, monkeypatch, forget):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine_cache, "disturbance", lambda *times: None)
    return tmp_path / "kt-moe"


class Probe:
    """Counts its calls; its entries are numbers."""

    def __init__(self, *, seconds=0.0, doubt=None):
        self.calls, self._seconds, self._doubt = 0, seconds, doubt

    def __call__(self):
        time.sleep(self._seconds)
        self.calls += 1
        return self.calls, self._doubt


def ask(measure, key="key"):
    return measured_once(NAME, key, lambda e: e if type(e) is int else None, measure)


def test_kept(folder, forget):
    probe = Probe()
    assert ask(probe) == ask(probe) == 1
    assert ask(probe, "other") == 2
    forget()
    assert (ask(probe), ask(probe, "other"), probe.calls) == (1, 2, 2)
    assert json.loads((folder / NAME).read_text()) == {"key": 1, "other": 2}
    assert os.listdir(folder) == [NAME]  # neither a lock nor a temporary file stays


def test_what_is_in_doubt_holds_for_this_process_only(folder, forget, monkeypatch):
    probe = Probe(doubt="two passes differ")
    assert ask(probe) == ask(probe) == 1
    forget()
    assert ask(probe) == 2
    busy = Probe()
    monkeypatch.setattr(machine_cache, "disturbance", lambda *times: "others used the CPUs")
    assert ask(busy, "busy") == ask(busy, "busy") == 1
    assert not folder.exists() or not os.listdir(folder)


def test_threads_measure_once(folder):
    probe, found = Probe(seconds=0.2, doubt="even where it is not kept"), []
    threads = [threading.Thread(target=lambda: found.append(ask(probe))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 4 and probe.calls == 1


SERVER = """
import os, sys, time
from kt_kernel.runtime import machine_cache
machine_cache.disturbance = lambda *times: None
def measure():
    time.sleep(0.5)
    return os.getpid(), None
print("ready", flush=True)
sys.stdin.readline()
for key in sys.argv[1:]:
    print(machine_cache.measured_once("threads.json", key, lambda entry: entry, measure))
"""


def test_servers_that_start_at_once(folder):
    """One measures, the others find its result; no entry is lost."""
    keys = [["key", "a"], ["key", "b"], ["c", "key"]]
    servers = [
        subprocess.Popen(
            [sys.executable, "-c", SERVER, *k],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for k in keys
    ]
    for server in servers:
        assert server.stdout.readline() == "ready\n"
    for server in servers:
        server.stdin.write("\n")
        server.stdin.flush()
    outs = [server.communicate(timeout=120)[0].split() for server in servers]
    found = [int(out[k.index("key")]) for out, k in zip(outs, keys, strict=True)]
    assert len(set(found)) == 1
    kept = json.loads((folder / NAME).read_text())
    assert sorted(kept) == ["a", "b", "c", "key"] and kept["key"] == found[0]


def test_a_fork_in_the_middle(folder):
    """The child waits for what a thread of its parent measures, and may outlive it."""
    probe, inside, go = Probe(), threading.Event(), threading.Event()

    def measure():
        inside.set()
        go.wait(60)
        return probe()

    thread = threading.Thread(target=ask, args=(measure,))
    thread.start()
    inside.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if ask(lambda: (99, None)) == 1 else 1)
    sleeper = os.fork()
    if sleeper == 0:
        time.sleep(60)
        os._exit(0)
    go.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    lock = FileLock(str(folder / "lock"))
    assert lock.acquire(0)  # the sleeper does not hold it
    lock.release()
    os.kill(sleeper, 9)
    os.waitpid(sleeper, 0)


def test_a_holder_of_the_lock_that_is_stuck(folder, monkeypatch):
    monkeypatch.setattr(machine_cache, "_lock_seconds", 0.2)
    folder.mkdir()
    stuck = FileLock(str(folder / "lock"))
    assert stuck.acquire(0)
    probe = Probe()
    begin = time.monotonic()
    assert ask(probe) == 1
    assert time.monotonic() - begin >= 0.2
    assert machine_cache._lock_seconds == 0  # waited for once
    assert ask(probe, "other") == 2
    stuck.release()
    assert json.loads((folder / NAME).read_text()) == {"key": 1, "other": 2}


CONTENTS = {
    "empty": b"",
    "cut": b'{"key": ',
    "list": b"[1]",
    "no text": b"\xff",
    "deep": b"[" * 100_000,
    "large": b'{"key": 7}' + b" " * (1 << 20),
    "other values": json.dumps({"key": {"threads": 3}, "kept": 5}).encode(),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_foreign_content(folder, forget, name):
    folder.mkdir()
    (folder / NAME).write_bytes(CONTENTS[name])
    probe = Probe()
    assert ask(probe) == 1
    forget()
    assert ask(probe) == 1 and probe.calls == 1
    kept = json.loads((folder / NAME).read_text())
    assert kept == {"key": 1} | ({"kept": 5} if name == "other values" else {})


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "loop"])
def test_what_is_no_file(folder, tmp_path, kind):
    """Nothing waits, and nothing outside the folder is touched."""
    folder.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (NAME, "lock"):
        if kind == "pipe":
            os.mkfifo(folder / name)
        elif kind == "folder":
            (folder / name).mkdir()
        else:
            (folder / name).symlink_to(victim if kind == "link" else folder / name)
    assert ask(Probe()) == 1
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("what", ["mkdir", "open"])
def test_a_home_that_is_read_only(folder, monkeypatch, capsys, what):
    """No error, and one line for whoever debugs, however much is measured."""

    def refuse(*arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system", str(arguments[0]))

    monkeypatch.setenv("KT_KERNEL_DEBUG", "1")
    monkeypatch.setattr(os, what, refuse)
    probe = Probe()
    assert (ask(probe), ask(probe, "other")) == (1, 2)
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if "not kept" in line]) == 1
    assert any("measurements are not kept" in line and "Read-only" in line for line in lines)


def test_no_folder_to_be_made(folder, tmp_path, monkeypatch):
    (tmp_path / "kt-moe").write_text("a file")
    assert ask(Probe()) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home():
        raise RuntimeError

    monkeypatch.setattr(machine_cache.Path, "home", no_home)
    probe = Probe()
    assert ask(probe) == ask(probe) == 1 and probe.calls == 1
    assert not list(machine_cache.entries()) and not machine_cache.clear()


def test_old_entries_go(folder, monkeypatch):
    monkeypatch.setattr(machine_cache, "_MOST_ENTRIES", 3)
    for number in range(5):
        ask(Probe(), str(number))
    assert list(json.loads((folder / NAME).read_text())) == ["2", "3", "4"]


# --- the machine


class Core:
    def __init__(self, nodes, quota):
        self.topology, self.cpu_quota = lambda: nodes, lambda: quota

    def cpu_brand(self):
        return "CPU"


def test_the_key_names_all_that_a_measurement_depends_on(monkeypatch, forget):
    found = []

    def key(version="1.0", nodes=((0, 8, 4),), quota=1 << 20, cpus=range(8), model="M"):
        monkeypatch.setattr(machine, "native", lambda: Core(list(nodes), quota))
        monkeypatch.setattr(machine, "_version", lambda: version)
        monkeypatch.setattr(machine, "cpu_model", lambda: model)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus))
        forget()
        found.append(machine.machine_key())

    key()
    key(version="1.1")
    key(model="N")
    key(nodes=((0, 8, 8),))
    key(nodes=((0, 4, 2), (1, 4, 2)))
    key(quota=3)
    key(cpus=range(8, 16))
    assert len(set(found)) == 7
    assert found[0] == "kt-moe 1.0, M, CPUs 0-7, nodes 0:8/4, quota 8"


STAT = """cpu  100 2 3 900 5 6 7 80 9 0
cpu0 1000 200 300 9000 500 60 70 8 900 0
cpu1 100 0 0 9000 0 0 0 0 0 0
cpu11 7 7 7 7 7 7 7 7 7 7
intr 1 2 3
"""


def test_times_of_the_allowed_cpus():
    lines = STAT.splitlines()
    assert machine.sum_times(lines, [0]) == pytest.approx((16.3, 0.08))
    assert machine.sum_times(lines, [0, 1]) == pytest.approx((17.3, 0.08))
    assert machine.sum_times([], [0]) == (0, 0)


@pytest.mark.parametrize(
    ("busy", "stolen", "own", "words"),
    [
        (8.0, 0.0, 8.0, None),
        (8.5, 0.0, 8.0, None),
        (9.5, 0.0, 8.0, "other processes used 19% of the CPUs"),
        (8.0, 0.1, 8.0, None),
        (8.0, 0.5, 8.0, "the host took 6% of the CPUs"),
        (0.0, 0.0, 8.0, None),  # where the system does not tell
    ],
)
def test_disturbances(busy, stolen, own, words):
    """Within two seconds on four CPUs."""
    before = machine.CpuTimes(50.0, 3.0, 1.0, 10.0)
    after = machine.CpuTimes(50.0 + busy, 3.0 + stolen, 1.0 + own, 12.0)
    found = machine.disturbance(before, after, 4)
    assert found is None if words is None else words in found


def test_nothing_is_said_of_no_time():
    """The counters of the system may be a tick off."""
    before = machine.CpuTimes(50.0, 3.0, 1.0, 10.0)
    assert machine.disturbance(before, machine.CpuTimes(50.04, 3.02, 1.0, 10.0), 4) is None


def test_a_busy_process_is_noticed():
    """With the real counters: this process alone is no disturbance, another one is."""
    cpus = machine.allowed_cpus()
    code = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"
    before = machine.cpu_times()
    if before.busy == 0:
        pytest.skip("/proc/stat says nothing here")
    others = [subprocess.Popen([sys.executable, "-c", code]) for _ in cpus]
    time.sleep(2)
    after = machine.cpu_times()
    for other in others:
        other.kill()
        other.wait()
    assert "other processes used" in machine.disturbance(before, after, len(cpus))
