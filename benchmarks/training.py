"""Routine "sft": a training step of one MoE layer with LoRA, ours and PEFT's on torch in turns.

Each side is a process of its own (training_side.py). A visit of a side runs whole steps; its
forward pass, its backward pass and the step are three lines.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from helper import Helper, HelperError
from methods import METHODS, TABLES_BY_UNIT, unit_of
from peer_client import PACKAGE
from rounds import Line
from shapes import Shape
from training_layers import SFT_METHODS, Batch, reference

Row = dict[str, Any]

PARTS = ("step", "forward", "backward")  # in the order of their lines
CHECKED_TOKENS = 64
# What a step may err against float32 with unquantised weights, by bits of the base weights. Both
# sides must do the same work; how exact it is, tests say.
MOST_ERROR = {16: 0.02, 8: 0.1, 4: 0.5}


@dataclass(frozen=True)
class Work:
    """Operations of a layer's step, two for each multiplication and addition.

    base: of the products with base weights in a forward pass, and again in its backward, which has
    no gradients of them to compute. lora: of LoRA's in a forward pass; backward has twice as many.
    """

    base: float
    lora: float

    @classmethod
    def of(cls, shape: Shape, rank: int, tokens: int) -> Work:
        routes = tokens * shape.top_k
        return cls(
            2.0 * routes * shape.weights, 2.0 * routes * 3 * rank * (shape.hidden + shape.inter)
        )

    @property
    def forward(self) -> float:
        return self.base + self.lora

    @property
    def backward(self) -> float:
        return self.base + 2 * self.lora


@dataclass(frozen=True)
class Setting:
    """What all sides of a setup have in common. threads: None for as many as kt_kernel takes."""

    shape: Shape
    rank: int
    table: str
    threads: int | None
    cpus: int
    tokens: list[int]
    peer: Path | None


class Side:
    """A process with a layer: kt_moe or kt-kernel with one of SFT_METHODS, or peft with one of
    TORCH_LAYERS."""

    def __init__(self, package: str, method: str, setting: Setting) -> None:
        self.package, self.method, self.setting = package, method, setting
        request = {
            "package": package,
            "method": method,
            "shape": list(setting.shape),
            "rank": setting.rank,
            "threads": setting.threads,
            "torch_threads": setting.threads or setting.cpus,
            "max_tokens": max(setting.tokens),
            "folder": str(setting.peer),
        }
        self.name = f"{package} {method}, rank {setting.rank}"
        self._helper = Helper(
            self.name,
            "training_side.py",
            request,
            _variables(package, setting.table),
            patience=120.0,
        )
        self._times: dict[str, list[float]] = {}

    @property
    def bits(self) -> float:
        """Of a base weight."""
        return 16 if self.package == "peft" else METHODS[SFT_METHODS[self.method]].bits

    def errors(self, wanted: list[torch.Tensor]) -> dict[str, float]:
        """Against what `reference` gave: of y, of the gradients of x and router weights, and the
        largest of LoRA's gradients."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "output.pt"
            self._helper.ask(output=CHECKED_TOKENS, path=str(path))
            found = torch.load(path)
        errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=False)]
        return {"y": errors[0], "x": errors[1], "weights": errors[2]} | (
            {"lora": max(errors[3:])} if errors[3:] else {}
        )

    def lines(
        self, tokens: int, errors: dict[str, float], ceilings: dict[str, float]
    ) -> list[Line]:
        setting = self.setting
        peak = self._helper.ask(memory=tokens)["peak"]
        work = Work.of(setting.shape, setting.rank, tokens)
        unit = base_unit = TABLES_BY_UNIT[setting.table][1]
        if self.package != "peft":
            base_unit = unit_of(METHODS[SFT_METHODS[self.method]], setting.table, ceilings)
        forward = {base_unit: work.base}
        forward[unit] = forward.get(unit, 0.0) + work.lora
        by_part = {
            "forward": forward,
            "backward": {unit: work.backward},
            "step": forward | {unit: forward[unit] + work.backward},
        }
        info = {
            "package": self.package,
            "method": self.method,
            "table": setting.table,
            "tokens": tokens,
            "threads": setting.threads or setting.cpus,
            "beside": "",
            "rank": setting.rank,
            "peak_bytes": peak,
            "errors": errors,
        }
        return [
            Line(
                info={**info, "part": part},
                bytes=0.0,
                operations=by_part[part][unit],
                visit=self._visitor(tokens, part),
                limits=setting.cpus,
                unit=unit,
                other_operations={u: n for u, n in by_part[part].items() if u != unit},
            )
            for part in PARTS
        ]

    def close(self) -> None:
        self._helper.close()

    def _visitor(self, tokens: int, part: str) -> Callable[[float], list[float]]:
        def visit(seconds: float) -> list[float]:
            if part == "step":  # the first of the three, which takes the time of all
                self._times = self._helper.ask(tokens=tokens, seconds=3 * seconds)
            return self._times[part]

        return visit


def _variables(package: str, table: str) -> dict[str, str]:
    """Of the environment: what keeps us to a kernel table, and torch with its libraries to its
    vectors. Beside threads of our own or kt-kernel's, torch's must not spin while they wait."""
    variables = {"KT_KERNEL_CPU_VARIANT": table}
    if package != "peft":
        variables["OMP_WAIT_POLICY"] = "PASSIVE"
    if table == "avx2":
        variables |= {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        }
    return variables


def training_lines(
    setting: Setting,
    methods: list[str],
    torch_layers: list[str],
    ceilings: dict[str, float],
    stack: ExitStack,
    note: Callable[[str], None],
) -> list[Line]:
    """The lines of all sides that can run here."""
    batch = Batch.make(setting.shape, CHECKED_TOKENS)
    wanted = reference(setting.shape, setting.rank, batch)
    without_lora = reference(setting.shape, setting.rank, batch, scaling=0.0)
    sides = [("kt_moe", name) for name in methods]
    if setting.peer:
        sides += [(PACKAGE, name) for name in methods]
    lines = []
    for package, method in sides + [("peft", name) for name in torch_layers]:
        try:
            side = Side(package, method, setting)
            stack.callback(side.close)
            errors = side.errors(without_lora if "fused" in method else wanted)
            most = next(most for least, most in MOST_ERROR.items() if side.bits >= least)
            if not max(errors.values()) < most:
                raise HelperError(f"{side.name}: wrong results, errors {errors}; not timed")
            for tokens in sorted(setting.tokens):  # so that buffers only grow
                lines += side.lines(tokens, errors, ceilings)
        except HelperError as error:
            note(str(error))
    return lines


def memory_needed(shape: Shape, rank: int, methods: list[str], torch_layers: list[str]) -> float:
    """Bytes about of all sides of a rank together."""
    weights = shape.experts * shape.weights
    bits = [METHODS[SFT_METHODS[name]].bits for name in methods]
    bits += [32 if "float32" in name else 16 for name in torch_layers]
    fused = sum("fused" in name for name in torch_layers)
    lora = shape.experts * 3 * rank * (shape.hidden + shape.inter)
    # LoRA with its gradient and the optimizer's state, in float32, and our packed copies of it. A
    # fused layer has a second copy of the weights in a step, and their gradient.
    each = lora * 24 + 0.5 * 2**30
    return sum(b / 8 * weights + each for b in bits) + fused * 12 * weights


def add_training_ratios(rows: list[Row]) -> None:
    """To each row its tokens/s, to backward rows their time over forward's, and to ours how many
    times faster they are than kt-kernel's; to our steps how many times faster they are than the
    fastest of PEFT's, and their peak memory over its."""
    of_part = {(_work(row), row["package"], row["method"], row["part"]): row for row in rows}
    for row in rows:
        work, method, part = _work(row), row["method"], row["part"]
        row["tokens_s"] = row["tokens"] / row["median_us"] * 1e6
        forward = of_part.get((work, row["package"], method, "forward"))
        if part == "backward" and forward:
            row["times_forward"] = row["median_us"] / forward["median_us"]
        if row["package"] != "kt_moe":
            continue
        if peer := of_part.get((work, PACKAGE, method, part)):
            row["times_faster_than_peer"] = peer["median_us"] / row["median_us"]
            row["memory_over_peer"] = row["peak_bytes"] / peer["peak_bytes"]
        theirs = [
            other
            for (its_work, package, _, its_part), other in of_part.items()
            if (its_work, package, its_part, part) == (work, "peft", "step", "step")
        ]
        if theirs:
            fastest = min(theirs, key=lambda other: other["median_us"])
            row["fastest_of_peft"] = fastest["method"]
            row["times_faster_than_peft"] = fastest["median_us"] / row["median_us"]
            row["memory_over_peft"] = row["peak_bytes"] / fastest["peak_bytes"]


def _work(row: Row) -> tuple[Any, ...]:
    return row["table"], row["threads"], row["rank"], row["tokens"]


def training_goals(row: Row) -> dict[str, tuple[float, bool]]:
    """What a row of ours must reach and whether it does, by the name of the figure; for at least
    512 tokens."""
    goals: dict[str, tuple[float, bool]] = {}
    if row["package"] != "kt_moe" or row["tokens"] < 512:
        return goals
    if "times_faster_than_peer" in row and row["part"] == "step":
        goals["times_faster_than_peer"] = 2.0, row["times_faster_than_peer"] >= 2
    if "times_faster_than_peft" in row:
        goals["times_faster_than_peft"] = (
            3.0,
            row["times_faster_than_peft"] >= 3 or row["share"] >= 0.6,
        )
        most = 1.0 if row["method"] == "AMXBF16_SFT" else 0.5
        goals["memory_over_peft"] = most, row["memory_over_peft"] <= most
    if "times_forward" in row:
        goals["times_forward"] = 2.5, row["times_forward"] <= 2.5
    return goals
