"""Converts repeatedly in children that are killed at a call; started by test_killed.py.

usage: killed.py SOURCE FOLDER METHOD POINTS...

A point is the number of the call to os.write, os.fsync, os.replace or os.unlink at which a child is
killed; each such child writes to its own folder. Half of a write is done first. 0 counts the calls
instead and prints their number. "f1000" limits the size of files to this many bytes, and prints the
error. "t0.1" kills a child after this many seconds; these children all continue the same folder,
"times". This process only forks, so each child starts fresh.
"""

import os
import resource
import signal
import sys
import time

from kt_kernel.conversion import Request, convert, make_plan

CALLS = ("write", "fsync", "replace", "unlink")


def kill_at(point: int) -> list[int]:
    count = [0]

    def watched(name):
        real = getattr(os, name)

        def call(*arguments):
            count[0] += 1
            if count[0] == point:
                if name == "write":
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        return call

    for name in CALLS:
        setattr(os, name, watched(name))
    return count


def child(source: str, output: str, method: str, point: int) -> None:
    count = kill_at(point)
    convert(make_plan(Request(source, output, method, threads=1, resume=True)))
    if point == 0:
        print(count[0], flush=True)


def limited(source: str, output: str, method: str, size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        convert(make_plan(Request(source, output, method, threads=1)))
    except OSError as error:
        print(error, flush=True)


def main() -> None:
    source, folder, method, *points = sys.argv[1:]
    for number, point in enumerate(points):
        timed = point.startswith("t")
        output = os.path.join(folder, "times" if timed else str(number))
        pid = os.fork()
        if pid == 0:
            try:
                if point.startswith("f"):
                    limited(source, output, method, int(point[1:]))
                else:
                    child(source, output, method, -1 if timed else int(point))
            finally:
                os._exit(0)
        if timed:
            time.sleep(float(point[1:]))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert timed or killed == (point.isdigit() and point != "0"), (point, status)


if __name__ == "__main__":
    main()
