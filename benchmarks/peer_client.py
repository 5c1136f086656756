"""Runs kt-kernel in turn with kt-moe: starts peer.py and requests times."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from helper import Helper
from layer import LayerBench, layer_line
from rounds import Line

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
CHECKED_TOKENS = 4


class Peer:
    """kt-kernel's layers for the same work as one of kt-moe's benches. Raises HelperError."""

    def __init__(self, folder: Path, bench: LayerBench, layers: int, max_tokens: int) -> None:
        self._bench, self._layers = bench, layers
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
        name = f"{PACKAGE}: {bench.method.name} with its {VARIANTS[bench.table]} variant"
        self._helper = Helper(name, "peer.py", request)
        try:
            self.difference = self._difference()
        except BaseException:
            self.close()
            raise

    def line(self, tokens: int, limits: int, ceilings: dict[str, float]) -> Line:
        bench = self._bench
        who = {
            "package": PACKAGE,
            "table": bench.table,
            "class": self._helper.ready,
            "difference": self.difference,
        }

        def visit(seconds: float) -> list[float]:
            return self._helper.ask(tokens=tokens, seconds=seconds)["times"]

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
        self._helper.close()

    def _difference(self) -> float:
        """The relative difference of the outputs for the same weights, which shows that both do the
        same work."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "output.pt"
            self._helper.ask(output=CHECKED_TOKENS, path=str(path))
            theirs = torch.load(path).float()
        ours = self._bench.output(CHECKED_TOKENS).float()
        return float((theirs - ours).norm() / ours.norm())
