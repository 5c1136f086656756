"""A process that works for this one. It is stopped between requests, so that its threads cannot
disturb other measurements.

`Helper` is this process's side, `serve` the other one. The program gets its first request as JSON,
and a file descriptor for its answers, one JSON object per line: {"ready": ...} or {"refused": why}
first, then one for each request on its standard input.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rounds import die_with_parent

Request = dict[str, Any]


class HelperError(RuntimeError):
    """The process cannot do its work here, or died; the message says which."""


class Helper:
    """A process of a program in this folder.

    name: its name in messages. environment: variables in addition to this process's. patience:
    seconds that an answer may take.
    """

    def __init__(
        self,
        name: str,
        program: str,
        request: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        patience: float = 300.0,
    ) -> None:
        self._name, self._patience = name, patience
        reader, writer = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name(program)),
                json.dumps(request),
                str(writer),
            ],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[writer],
            preexec_fn=die_with_parent,
            env=os.environ | (environment or {}),
        )
        os.close(writer)
        self._replies = os.fdopen(reader)
        try:
            self.ready = self._answer()["ready"]
        except BaseException:
            self.close()
            raise

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request. Raises HelperError."""
        os.kill(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._replies.close()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        if not select.select([self._replies], [], [], self._patience)[0]:
            raise HelperError(f"{self._name} gave no answer for {self._patience:.0f} s")
        line = self._replies.readline()
        if not line:
            raise self._died()
        os.kill(self._process.pid, signal.SIGSTOP)
        answer = json.loads(line)
        if "refused" in answer:
            raise HelperError(f"{self._name}: {answer['refused']}")
        return answer

    def _died(self) -> HelperError:
        code = self._process.wait()
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return HelperError(f"{self._name} died ({how}) {' '.join(last)}".rstrip())


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


def serve(
    start: Callable[[Request], tuple[Any, Callable[[Request], Request]]],
    refusals: tuple[type[Exception], ...],
    describe: Callable[[Exception], str] = first_line,
) -> None:
    """The main function of a helper's program.

    start: takes the first request, and returns the value of "ready" and a function that answers the
    later ones. If it raises one of ``refusals``, the process ends with describe(error).
    """
    replies = os.fdopen(int(sys.argv[2]), "w", buffering=1)

    def reply(content: Request) -> None:
        replies.write(json.dumps(content) + "\n")

    try:
        ready, answer = start(json.loads(sys.argv[1]))
    except refusals as error:
        reply({"refused": describe(error)})
        return
    reply({"ready": ready})
    for line in sys.stdin:
        reply(answer(json.loads(line)))
