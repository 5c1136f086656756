"""Files that are replaced in one step, and locks between processes."""

import errno
import os
import socket
import stat
import subprocess
import sys
import time
import traceback
from functools import partial

import pytest

from kt_kernel.runtime import files
from kt_kernel.runtime.file_lock import FileLock
from kt_kernel.runtime.files import (
    Replacement,
    need_folder,
    need_replaceable,
    need_writable,
    replace_file,
    write_output,
)
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


def test_an_error_leaves_the_old_file(tmp_path):
    replace_file(tmp_path / "f", "old")
    with pytest.raises(ZeroDivisionError), Replacement(str(tmp_path / "f")) as new:
        new.write(b"new")
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == ["f"] and (tmp_path / "f").read_text() == "old"


def test_an_error_at_the_end_of_a_file_leaves_the_old_one(tmp_path, monkeypatch):
    """NFS tells only then that the disk is full."""
    path = tmp_path / "file"
    path.write_text("old")
    close = os.close

    def full(fd):
        named = os.readlink(f"/proc/self/fd/{fd}")
        close(fd)
        if named.startswith(f"{path}."):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "close", full)
    with pytest.raises(OSError, match="No space left") as error:
        replace_file(path, "new")
    assert error.value.filename == str(path)
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


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


# --- what a user names

WRITERS = {
    "once": (need_writable, write_output),
    "again": (partial(need_writable, again=True), partial(write_output, again=True)),
}


@pytest.fixture(params=WRITERS)
def writer(request):
    """The check, and what it is made for."""
    return WRITERS[request.param]


def test_links_stay(tmp_path, monkeypatch, writer):
    """To a file, by another link and from another folder, and to one that is yet to be made."""
    check, write = writer
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a" / "old").write_text("old")
    (tmp_path / "b" / "link").symlink_to("../a/old")
    (tmp_path / "c" / "link").symlink_to("../b/link")
    (tmp_path / "c" / "dangling").symlink_to("../a/new")
    monkeypatch.chdir(tmp_path / "c")
    for name in ("link", "dangling"):
        check(name)
        write(name, name)
        assert os.path.islink(name)
    assert os.path.islink("../b/link")
    assert (tmp_path / "a" / "old").read_text() == "link"
    assert (tmp_path / "a" / "new").read_text() == "dangling"
    assert sorted(os.listdir(tmp_path / "a")) == ["new", "old"]
    assert len(os.listdir(tmp_path / "b")) == 1 and len(os.listdir(tmp_path / "c")) == 2


def circle(folder):
    (folder / "one").symlink_to("other")
    (folder / "other").symlink_to("one")
    return folder / "one"


def nowhere(folder):
    (folder / "link").symlink_to("none/file")
    return folder / "link"


def unix_socket(folder):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.close()
    return folder / "socket"


def below_a_file(folder):
    (folder / "file").touch()
    return folder / "file" / "below"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (lambda folder: folder, "not a regular file"),
        (lambda folder: folder / "none" / "file", "No such file or directory"),
        (lambda folder: f"{folder}/none/", "No such file or directory"),
        (lambda folder: "", "No such file or directory"),
        (below_a_file, "Not a directory"),
        (nowhere, "No such file or directory"),
        (circle, "Too many levels of symbolic links"),
        (unix_socket, "not a regular file"),
    ],
    ids=["folder", "missing", "trailing", "empty", "below", "nowhere", "circle", "socket"],
)
def test_what_cannot_be_written(tmp_path, monkeypatch, writer, place, words):
    """The check and the writer say the same, and nothing is left behind."""
    path = place(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(os.listdir(tmp_path))
    for call in (writer[0], lambda path: writer[1](path, "data")):
        with pytest.raises(OSError, match=words) as caught:
            call(path)
        assert caught.value.filename is not None
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("kind", WRITERS)
def test_permissions_that_lack(tmp_path, monkeypatch, kind):
    """Of an existing file, of a link to it, and of the folder. Root may do everything, so another
    user tries."""
    for name in ("folder", "closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o777)
    file, pipe = tmp_path / "folder" / "file", tmp_path / "folder" / "pipe"
    file.write_text("precious")
    os.mkfifo(pipe)
    for path in (file, pipe):
        path.chmod(0o444)
    (tmp_path / "folder" / "link").symlink_to("file")
    (tmp_path / "closed").chmod(0o555)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setresuid(65534, 65534, 65534)
            names = ["folder/file", "folder/link", "closed/new"]
            for name in names + ["folder/pipe"] * (kind == "once"):
                for call in (WRITERS[kind][0], lambda path: WRITERS[kind][1](path, "new")):
                    with pytest.raises(PermissionError) as caught:
                        call(name)
                    assert caught.value.filename == name
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert file.read_text() == "precious"


def test_what_is_no_file_stays(tmp_path):
    """As root, /dev/null would be gone for everybody. What is written again and again does not wait
    for a reader."""
    os.mkfifo(tmp_path / "f")
    for call in (
        need_replaceable,
        lambda path: replace_file(path, "data"),
        lambda path: need_writable(path, again=True),
        lambda path: write_output(path, "data", again=True),
    ):
        for path in (tmp_path / "f", "/dev/null"):
            with pytest.raises(OSError, match=r"not a regular file: '.*/(f|null)'"):
                call(path)
    assert stat.S_ISFIFO(os.stat(tmp_path / "f").st_mode) and os.listdir(tmp_path) == ["f"]
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with open(tmp_path / "open", "w") as file:
        for path in ("/dev/stdout", f"/dev/fd/{file.fileno()}"):
            with pytest.raises(OSError, match=f"not a regular file: '{path}'"):
                write_output(path, "data", again=True)
    assert os.path.islink("/dev/stdout")


@pytest.mark.parametrize("link", [False, True])
def test_output_to_a_pipe(tmp_path, link):
    """The check does not open it, or a reader would see the end."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    if link:
        (tmp_path / "link").symlink_to("pipe")
    need_writable(path)
    data = bytes(range(256)) * 1024  # more than it holds
    with open(tmp_path / "out", "wb") as out, subprocess.Popen(["cat", path], stdout=out) as reader:
        need_writable(path)
        write_output(tmp_path / "link" if link else path, data)
        assert reader.wait(timeout=60) == 0
    assert (tmp_path / "out").read_bytes() == data
    assert stat.S_ISFIFO(os.stat(path).st_mode)


def test_output_to_a_device(tmp_path):
    (tmp_path / "null").symlink_to("/dev/null")
    for path in ("/dev/null", tmp_path / "null"):
        need_writable(path)
        write_output(path, "data")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(OSError, match=r"No space left.*/dev/full"):
        write_output("/dev/full", "data")


STREAMS = r"""
import sys
from kt_kernel.runtime.files import need_writable, write_output
print("before")
need_writable(sys.argv[1])
write_output(sys.argv[1], "text\n")
print("after")
"""


@pytest.mark.parametrize(
    ("path", "to"), [("/dev/stdout", "file"), ("/dev/fd/1", "socket"), ("LINK", "pipe")]
)
def test_output_to_standard_output(tmp_path, path, to):
    """What is printed before and after it keeps its place, wherever the output goes. A file that
    was replaced or opened anew would lose something."""
    if path == "LINK":
        path = str(tmp_path / "link")
        os.symlink("/dev/stdout", path)
    command = [sys.executable, "-c", STREAMS, path]
    if to == "pipe":
        found = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    elif to == "socket":
        ours, theirs = socket.socketpair()
        with ours, theirs:
            subprocess.run(command, stdout=theirs, check=True)
            found = ours.recv(1000)
    else:
        with open(tmp_path / "out", "wb") as file:
            file.write(b"earlier\n")
            file.flush()
            subprocess.run(command, stdout=file, check=True)
        found = (tmp_path / "out").read_bytes().removeprefix(b"earlier\n")
    assert found == b"before\ntext\nafter\n"


def test_descriptors_that_are_not_for_writing():
    for path, words in (("/dev/fd/999", "Bad file descriptor"), ("READ", "for reading only")):
        with open(os.devnull) as file:
            name = path if path != "READ" else f"/dev/fd/{file.fileno()}"
            with pytest.raises(OSError, match=words) as caught:
                need_writable(name)
            with pytest.raises(OSError, match="Bad file descriptor"):
                write_output(name, "data")
        assert caught.value.filename == name


def test_folders(tmp_path):
    (tmp_path / "file").touch()
    need_folder(str(tmp_path))
    need_folder(str(tmp_path / "new" / "below"))
    assert os.listdir(tmp_path) == ["file"]
    for name in ("file", "file/below"):
        with pytest.raises(NotADirectoryError, match="file"):
            need_folder(str(tmp_path / name))


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
