"""Runs kt-kernel in turn with kt-moe: starts peer.py and requests times. Its process is stopped
between visits, so that its threads do not disturb kt-moe's."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from layer import LayerBench, layer_line
from rounds import Line, die_with_parent

from kt_kernel.runtime.pools import plan_pools

PACKAGE = "kt-kernel 0.7.2"
VARIANTS = {  # of kt-kernel's wheel, by kt-moe's kernel table
    "amx": "amx",
    "avx512_bf16": "avx512_bf16",
    "avx512_vbmi": "avx512_vbmi",
    "avx512_vnni": "avx512_vnni",
    "avx512": "avx512_base",
    "avx2": "avx2",
}
PATIENCE = 300.0  # seconds for an answer
CHECKED_TOKENS = 4


class PeerError(RuntimeError):
    """kt-kernel cannot run here, or has died; the message says which."""


class Peer:
    """kt-kernel's layers for the same work as one of kt-moe's benches."""

    def __init__(self, folder: Path, bench: LayerBench, layers: int, max_tokens: int) -> None:
        self._bench, self._layers = bench, layers
        self._what = f"{bench.method.name} with its {VARIANTS[bench.table]} variant"
        plan = plan_pools(bench.threads, None, None)
        request = {
            "folder": str(folder),
            "variant": VARIANTS[bench.table],
            "method": bench.method.name,
            "shape": list(bench.shape),
            "layers": layers,
            "max_tokens": max_tokens,
            "threads": list(plan.threads),
            "nodes": list(plan.nodes),
        }
        reader, writer = os.pipe()
        program = Path(__file__).with_name("peer.py")
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, str(program), json.dumps(request), str(writer)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[writer],
            preexec_fn=die_with_parent,
        )
        os.close(writer)
        self._replies = os.fdopen(reader)
        try:
            self.class_name = self._answer()["ready"]
            self.difference = self._difference()
        except BaseException:
            self.close()
            raise

    def line(self, tokens: int, limits: int, ceilings: dict[str, float]) -> Line:
        bench = self._bench
        who = {
            "package": PACKAGE,
            "table": bench.table,
            "class": self.class_name,
            "difference": self.difference,
        }

        def visit(seconds: float) -> list[float]:
            return self._ask(tokens=tokens, seconds=seconds)["times"]

        return layer_line(
            who,
            bench.shape,
            bench.method,
            bench.table,
            tokens,
            bench.threads,
            self._layers,
            bench.packed,
            "",
            limits,
            ceilings,
            visit,
        )

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._replies.close()
        self._log.close()

    def _difference(self) -> float:
        """The relative difference of the outputs for the same weights, which shows that both do the
        same work."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "output.pt"
            self._ask(output=CHECKED_TOKENS, path=str(path))
            theirs = torch.load(path).float()
        ours = self._bench.output(CHECKED_TOKENS).float()
        return float((theirs - ours).norm() / ours.norm())

    def _ask(self, **request: Any) -> dict[str, Any]:
        os.kill(self._process.pid, signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        if not select.select([self._replies], [], [], PATIENCE)[0]:
            raise PeerError(f"{PACKAGE}: {self._what} gave no answer for {PATIENCE:.0f} s")
        line = self._replies.readline()
        if not line:
            raise self._died()
        os.kill(self._process.pid, signal.SIGSTOP)
        answer = json.loads(line)
        if "refused" in answer:
            raise PeerError(f"{PACKAGE}: {answer['refused']}")
        return answer

    def _died(self) -> PeerError:
        code = self._process.wait()
        self._log.seek(0)
        last = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return PeerError(f"{PACKAGE}: {self._what} died ({how}) {' '.join(last)}".rstrip())
