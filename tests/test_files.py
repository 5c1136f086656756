"""Files that are replaced in one step, and locks between processes."""

import os
import stat
import subprocess
import sys
import time

import pytest

from kt_kernel.runtime import files
from kt_kernel.runtime.file_lock import FileLock
from kt_kernel.runtime.files import Replacement, replace_file
from kt_kernel.weights.store.atomic import AtomicFile


@pytest.fixture
def umask():
    old = os.umask(0o022)
    yield
    os.umask(old)


def mode(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.mark.parametrize("kind", [Replacement, AtomicFile])
def test_a_link_at_the_temporary_name_is_not_followed(tmp_path, monkeypatch, kind):
    """Whoever may write to the folder could have put it there, even if the name were known."""
    monkeypatch.setattr(files.secrets, "token_hex", lambda n: "known")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("f.partial", "f.known.partial"):
        (tmp_path / name).symlink_to(victim)
    try:
        with kind(str(tmp_path / "f")) as new:
            new.write(b"data")
            new.commit()
        assert (tmp_path / "f").read_bytes() == b"data" and not (tmp_path / "f").is_symlink()
    except FileExistsError:
        assert kind is Replacement and not (tmp_path / "f").exists()
    assert victim.read_text() == "precious"


def test_two_writers_use_different_names(tmp_path):
    path = str(tmp_path / "f")
    with Replacement(path) as one, Replacement(path) as other:
        for new, data in ((one, b"one"), (other, b"other")):
            new.write(data)
            new.commit()
    assert os.listdir(tmp_path) == ["f"] and (tmp_path / "f").read_bytes() == b"other"


def test_permissions(tmp_path, umask):
    """Those of any new file, then whatever the user gave it."""
    path = tmp_path / "f"
    replace_file(path, "1")
    assert mode(path) == 0o644
    for wanted in (0o600, 0o664):
        path.chmod(wanted)
        replace_file(path, "2")
        assert mode(path) == wanted and path.read_text() == "2"


def test_a_link_is_replaced_and_not_followed(tmp_path, umask):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "victim").chmod(0o600)
    (tmp_path / "f").symlink_to("victim")
    replace_file(tmp_path / "f", "data")
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "f").read_text() == "data" and mode(tmp_path / "f") == 0o644


def test_what_is_no_file_stays(tmp_path):
    """As root, /dev/null would be gone for everybody."""
    os.mkfifo(tmp_path / "f")
    with pytest.raises(OSError, match=r"not a regular file: '.*/f'"):
        replace_file(tmp_path / "f", "data")
    assert stat.S_ISFIFO(os.stat(tmp_path / "f").st_mode) and os.listdir(tmp_path) == ["f"]


def test_an_error_leaves_the_old_file(tmp_path):
    replace_file(tmp_path / "f", "old")
    with pytest.raises(ZeroDivisionError), Replacement(str(tmp_path / "f")) as new:
        new.write(b"new")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["f"] and (tmp_path / "f").read_text() == "old"


@pytest.mark.parametrize(("durable", "synced"), [(True, 2), (False, 0)])
def test_durability(tmp_path, monkeypatch, durable, synced):
    """The file before it is renamed, then the folder."""
    calls = []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync"))
    real = os.replace
    monkeypatch.setattr(os, "replace", lambda *a: calls.append("replace") or real(*a))
    monkeypatch.chdir(tmp_path)
    with Replacement("f", durable=durable) as new:
        new.commit()
    assert calls.count("fsync") == synced
    assert calls == (["fsync", "replace", "fsync"] if durable else ["replace"])


# --- locks


def test_lock_between_objects_and_processes(tmp_path):
    path = str(tmp_path / "lock")
    one, other = FileLock(path), FileLock(path)
    assert one.acquire(0) and not other.acquire(0)
    code = (
        f"from kt_kernel.runtime.file_lock import FileLock; l = FileLock({path!r})\n"
        "print(l.acquire(0), flush=True); print(l.acquire(None), flush=True); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "False\n"
    one.release()
    assert process.stdout.readline() == "True\n" and not other.acquire(0.1)
    process.kill()  # gives it back
    process.communicate()
    assert other.acquire(5)
    one.release()  # has nothing to give back
    assert not one.acquire(0)
    other.release()
    assert not os.listdir(tmp_path)


def test_a_forked_child_has_no_lock(tmp_path):
    """It neither keeps the lock from others nor gives the parent's back."""
    lock = FileLock(str(tmp_path / "lock"))
    assert lock.acquire(0)
    child = os.fork()
    if child == 0:
        lock.release()
        alone = FileLock(str(tmp_path / "lock")).acquire(0)
        os._exit(1 if alone else 0)
    assert os.waitpid(child, 0)[1] == 0
    sleeper = os.fork()
    if sleeper == 0:
        time.sleep(60)
        os._exit(0)
    lock.release()
    other = FileLock(str(tmp_path / "lock"))
    assert other.acquire(0)
    other.release()
    os.kill(sleeper, 9)
    os.waitpid(sleeper, 0)


def test_a_link_in_the_place_of_a_lock(tmp_path):
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="lock"):
        FileLock(str(tmp_path / "lock")).acquire(0)
    assert not (tmp_path / "elsewhere").exists()
