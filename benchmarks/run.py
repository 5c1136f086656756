"""Times the kernels against this machine's ceilings, measured in the same run.

    python benchmarks/run.py                                   # all methods, Qwen3-30B-A3B's layer
    python benchmarks/run.py --methods BF16 FP8 --tables amx avx2 --tokens 1 8 64 --json out.json
    python benchmarks/run.py --routine gemv --threads 1 0      # kernels alone, on 1 and all threads
    python benchmarks/run.py --peer FOLDER                     # together with kt-kernel
    python benchmarks/run.py --threads 8 15 16 --foreign 2     # scheduling
    python benchmarks/run.py --routine sft --experts 64        # training, next to PEFT on the CPU

Routines: layer (a forward pass), gemv and gemm (a single kernel), pack (source weights to packed
weights), load (a checkpoint file), sft (a training step of a layer with LoRA). Each line has the
median time and its share of t_min, the time that the ceilings allow: the larger of (bytes) / (read
bandwidth) and (operations) / (peak of the unit that the method may use). All lines are visited in
turn, in several rounds, so that disturbances of a shared machine affect all alike. Small batches
visit disjoint experts in cyclic order, over twice the last-level cache, so that no expert is read
from a cache. Needs g++ for the ceilings (roofline.cpp). docs/performance.md has the details.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from machine import Ceilings, about, busy_note
from methods import METHODS, SOURCES, USUAL_METHODS
from outputs import output_file, save_result
from report import add_fair_shares, add_ratios, print_beside, print_ceilings, print_rows, row_of
from rounds import Line, end_foreign, run_rounds
from setups import ROWS, NotMeasured, Setup, setups
from shapes import SHAPES, TOKENS, parse_shape
from training import add_training_ratios
from training_layers import SFT_METHODS, TORCH_LAYERS

from kt_kernel import _C
from kt_kernel.runtime.machine import allowed_cpus, available_memory

ROUTINES = ("layer", "gemv", "gemm", "pack", "load", "sft")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--routine", default="layer", choices=ROUTINES)
    add(
        "--methods",
        nargs="+",
        choices=[*METHODS, *SFT_METHODS],
        metavar="METHOD",
        help="default: all except ggml's formats; sft: " + ", ".join(SFT_METHODS),
    )
    add(
        "--tables",
        nargs="+",
        default=_C.kernel_tables()[:1],
        choices=_C.kernel_tables(),
        help="kernel tables (default: the best)",
    )
    add("--tokens", nargs="+", type=int, help="T, or rows of X for gemv and gemm")
    add("--shape", default="qwen3-30b-a3b", help=f"{', '.join(SHAPES)}, or E,H,I,k")
    add("--experts", type=int, help="fewer experts than the shape has (pack: how many in turn)")
    add("--ranks", nargs="+", type=int, default=[16], help="sft: of the LoRA matrices")
    add(
        "--peft",
        nargs="*",
        default=list(TORCH_LAYERS),
        choices=TORCH_LAYERS,
        metavar="LAYER",
        help="sft: layers that PEFT trains with torch, of " + "; ".join(TORCH_LAYERS),
    )
    add("--layers", type=int, help="default: until the experts are twice the last-level cache")
    add(
        "--threads",
        nargs="+",
        type=int,
        help="0: kt_kernel's default (gemv and gemm: 1 and 0)",
    )
    add("--foreign", nargs="+", type=int, default=[], help="also measure next to N busy processes")
    add("--torch-pool", action="store_true", help="also measure next to torch's spinning threads")
    add(
        "--sources",
        nargs="+",
        default=["BF16"],
        choices=SOURCES,
        help="load: types of checkpoints for methods that quantise",
    )
    add(
        "--page-cache",
        nargs="+",
        default=["warm"],
        choices=["warm", "cold"],
        help="load: files in the page cache, or removed from it before each load",
    )
    add("--working-set", type=int, help="MiB of packed weights for gemv and gemm")
    add("--peer", type=Path, help="folder with an unpacked wheel of kt-kernel 0.7.2")
    add("--seconds", type=float, default=1.0, help="for each line, over all rounds")
    add("--rounds", type=int, default=5)
    add("--budget", type=float, help="minutes for the whole run; shortens --seconds")
    add("--memory", type=float, help="GiB to use at once (default: half of the free memory)")
    add(
        "--ceiling-mib",
        type=int,
        help="memory read for the bandwidths (default: 4 times the cache)",
    )
    add("--json", type=output_file, help="save after each round")
    add("--plot", type=output_file, help="PNG of the shares and the roofline (needs matplotlib)")
    args = parser.parse_args(argv)
    try:
        args.shape = parse_shape(args.shape)
    except ValueError as error:
        parser.error(str(error))
    if args.experts and args.routine != "pack":
        args.shape = args.shape._replace(experts=min(args.experts, args.shape.experts))
    if args.peer and args.routine not in ("layer", "sft"):
        parser.error("--peer needs --routine layer or sft")
    if args.plot:
        import plot  # noqa: F401 - fails before minutes are spent

    sft = args.routine == "sft"
    args.methods = args.methods or (list(SFT_METHODS) if sft else USUAL_METHODS)
    for name in args.methods:
        if name not in (SFT_METHODS if sft else METHODS):
            parser.error(f"{name} does not go with --routine {args.routine}")
    kernels = args.routine in ("gemv", "gemm")
    args.tokens = args.tokens or ROWS.get(args.routine, TOKENS)
    args.threads = [n or None for n in args.threads or ([1, 0] if kernels else [0])]
    args.beside = [
        "",
        *(["torch"] if args.torch_pool else []),
        *(f"{n} foreign" for n in args.foreign),
    ]
    args.working_set = args.working_set and args.working_set << 20
    args.cpus = min(len(allowed_cpus()), _C.cpu_quota())
    return args


def groups(all_setups: list[Setup], most: float) -> list[list[Setup]]:
    """Groups setups in their order, as many at once as the memory allows."""
    made: list[list[Setup]] = []
    for setup in all_setups:
        if made and sum(s.memory for s in made[-1]) + setup.memory <= most:
            made[-1].append(setup)
        else:
            made.append([setup])
    return made


class Report:
    """The result so far."""

    def __init__(
        self, args: argparse.Namespace, ceilings: Ceilings, before: dict[str, Any]
    ) -> None:
        self._args, self._ceilings = args, ceilings
        self.notes: list[str] = []
        self.lines: list[Line] = []
        self._about = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **before,
            "routine": args.routine,
            "shape": args.shape._asdict(),
            "seconds": args.seconds,
            "rounds": args.rounds,
            "command": sys.argv[1:],
        }
        self.cache = self._about["last_level_cache"]

    def note(self, text: str) -> None:
        print(f"- {text}", flush=True)
        self.notes.append(text)

    def content(self) -> dict[str, Any]:
        """The content to save, with rows of all lines that have a time."""
        rows = [row_of(x, self._ceilings.of(x.limits)) for x in self.lines if x.times]
        if self._args.routine == "sft":
            add_training_ratios(rows)
        else:
            add_ratios(rows)
            add_fair_shares(rows, self._args.cpus)
        return {
            **self._about,
            "ceilings": self._ceilings.record(),
            "notes": self.notes,
            "rows": rows,
        }

    def save(self) -> None:
        if self._args.json:
            save_result(self._args.json, self.content())


def run_group(
    group: list[Setup],
    args: argparse.Namespace,
    report: Report,
    ceilings: Ceilings,
    minutes_left: float | None,
) -> None:
    begin = time.monotonic()
    with ExitStack() as stack:
        stack.callback(end_foreign)
        lines = []
        for setup in group:
            if setup.memory > available_memory():
                need = f"{setup.memory / 2**30:.1f} GiB"
                report.note(f"{setup.what}: needs {need}, which is not free; use fewer --experts")
                continue
            try:
                lines += setup.build(stack, report.note)
            except (NotMeasured, ValueError, NotImplementedError, KeyError) as error:
                report.note(f"{setup.what}: {error}")
        if not lines:
            return
        spent = time.monotonic() - begin
        print(f"{len(lines)} lines set up in {spent:.0f} s", flush=True)
        for line in lines:
            reach = line.info.get("reuse_distance", 2 * report.cache)
            if reach < 2 * report.cache:
                report.note(
                    f"{line.info['method']}: the {reach >> 20} MiB visited are less than twice the "
                    f"last-level cache of {report.cache >> 20} MiB, which may serve them"
                )
                break
        report.lines += lines

        def after_round(number: int) -> None:
            ceilings.measure_memory()
            report.save()
            print(f"round {number + 1} done after {time.monotonic() - begin:.0f} s", flush=True)

        left = float("inf") if minutes_left is None else 60 * minutes_left - spent
        run_rounds(lines, args.rounds, args.seconds, time.monotonic() + left, after_round)
        for line in lines:
            line.visit = None


def main() -> None:
    args = parse()
    begin = time.monotonic()
    torch.manual_seed(0)
    before = about()  # before this run adds to the load
    cache = before["last_level_cache"]
    read = args.ceiling_mib or max(2048, min(4 * cache, available_memory() // 4) >> 20)
    ceilings = Ceilings(read)
    ceilings.measure(args.cpus)
    reserve = 2 * (time.monotonic() - begin)  # to measure them again at the end
    report = Report(args, ceilings, before)
    if busy := busy_note(before["load_average"], args.cpus):
        report.note(busy)
    most = args.memory * 2**30 if args.memory else available_memory() / 2
    left = groups(setups(args, ceilings, cache), most)
    while left:
        minutes = None
        if args.budget is not None:
            spent = (time.monotonic() - begin + reserve) / 60
            here = len(left[0]) / sum(len(group) for group in left)
            minutes = max(0.0, args.budget - spent) * here
        run_group(left.pop(0), args, report, ceilings, minutes)
    ceilings.measure_all()
    content = report.content()
    report.save()
    print_ceilings(content)
    print_rows(content["rows"], args.routine)
    if args.routine == "layer":
        print_beside(content["rows"])
    for text in report.notes:
        print(f"- {text}")
    if args.plot:
        from plot import plot

        plot([content], args.plot)


if __name__ == "__main__":
    sys.exit(main())
