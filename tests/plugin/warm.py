"""Runs in an engine's environment: imports modules once, then runs commands in forks of itself.

    warm.py MODULE...

Reads requests from stdin, one JSON object per line: {"module": to run as `python -m` does,
"arguments", "log": file for its output}. Answers with the exit code of each. When stdin ends, this
process and everything that forks have left running are killed.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import sys

from heap import freeze


def main() -> None:
    sys.path[0] = os.getcwd()  # as in `python -m`
    for module in sys.argv[1:]:
        importlib.import_module(module)
    loaded = [name for name in sys.modules if name.startswith("kt_kernel.plugin_entrypoints")]
    assert not loaded, f"importing the engine has loaded the plugin: {loaded}"
    freeze()
    answers = os.dup(1)
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            os.close(answers)
            run(**json.loads(line))
            return
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(answers, f"{code}\n".encode())
    os.killpg(os.getpid(), signal.SIGKILL)


def run(module: str, arguments: list[str], log: str) -> None:
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdin = open(0)  # noqa: SIM115 - stays open as long as the process
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
