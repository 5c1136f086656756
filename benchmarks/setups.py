"""Sets up each routine for the lines of its table, and estimates the memory that it takes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from helper import HelperError
from layer import LayerBench, layers_needed
from machine import Ceilings
from methods import METHODS, Method
from packing import PackBench, experts_needed
from peer_client import Peer
from product import KernelBench
from rounds import Line
from training import Setting, memory_needed, training_lines

# Rows of X, or tokens of a step, by default.
ROWS = {"gemv": (1, 2, 4), "gemm": (16, 64, 128), "sft": (64, 512, 2048)}


class NotMeasured(Exception):
    """The reason why a part of the table stays empty."""


@dataclass
class Setup:
    """Things to measure together. build: creates them, leaves closing them to the stack, and
    reports what cannot be measured to `note`."""

    what: str
    memory: float
    build: Callable[[ExitStack, Callable[[str], None]], list[Line]]


def setups(args: argparse.Namespace, ceilings: Ceilings, cache: int) -> list[Setup]:
    """cache: bytes of the last-level cache. Raises NotMeasured if nothing can be measured."""
    make = {
        "layer": _layers,
        "gemv": _kernels,
        "gemm": _kernels,
        "pack": _packs,
        "load": _loads,
        "sft": _steps,
    }
    return make[args.routine](args, ceilings, cache)


def _methods(args: argparse.Namespace) -> list[Method]:
    return [METHODS[name] for name in args.methods]


def _layers(args: argparse.Namespace, ceilings: Ceilings, cache: int) -> list[Setup]:
    made = []
    shape, limits = args.shape, args.cpus
    for method in _methods(args):
        layers = args.layers or layers_needed(shape, method, cache)
        memory = layers * shape.experts * shape.weights * method.bits / 8
        stacked = shape.experts * shape.weights * 2 if method.per_row_integer else 0
        for table in args.tables:
            for threads in args.threads:

                def build(
                    stack: ExitStack,
                    note: Callable[[str], None],
                    method: Method = method,
                    table: str = table,
                    threads: int | None = threads,
                    layers: int = layers,
                ) -> list[Line]:
                    bench = LayerBench(shape, method, table, threads, layers)
                    peer = None
                    if args.peer:
                        try:
                            peer = Peer(args.peer, bench, layers, max(args.tokens))
                            stack.callback(peer.close)
                        except HelperError as error:
                            note(str(error))
                    known = ceilings.of(limits)
                    lines = []
                    for tokens in args.tokens:
                        if not bench.output(tokens).isfinite().all():
                            raise NotMeasured(f"T={tokens}: the output is not finite")
                        lines += [bench.line(tokens, what, limits, known) for what in args.beside]
                        if peer:
                            lines.append(peer.line(tokens, limits, known))
                    return lines

                what = f"{method.name} {table}" + (f" {threads} threads" if threads else "")
                total = memory * (2 if args.peer else 1) + (stacked if args.peer else 0)
                made.append(Setup(what, total, build))
    return made


def _kernels(args: argparse.Namespace, ceilings: Ceilings, cache: int) -> list[Setup]:
    gemm = args.routine == "gemm"
    working_set = args.working_set or int(2.1 * cache)
    made = []
    for method in _methods(args):
        for table in args.tables:
            for threads in args.threads:

                def build(
                    stack: ExitStack,
                    note: Callable[[str], None],
                    method: Method = method,
                    table: str = table,
                    threads: int | None = threads,
                ) -> list[Line]:
                    bench = KernelBench(args.shape, method, table, gemm, threads, working_set)
                    if not ceilings.has(bench.threads):
                        ceilings.measure(bench.threads)
                    known = ceilings.of(bench.threads)
                    return [bench.line(rows, known) for rows in args.tokens]

                what = f"{method.name} {table} {args.routine} {threads or 'all'} threads"
                made.append(Setup(what, working_set, build))
    return made


def _packs(args: argparse.Namespace, ceilings: Ceilings, cache: int) -> list[Setup]:
    made = []
    for method in _methods(args):
        experts = args.experts or experts_needed(args.shape, method, cache)
        bits = method.bits + (16 if method.dense else method.bits)

        def build(
            stack: ExitStack,
            note: Callable[[str], None],
            method: Method = method,
            experts: int = experts,
        ) -> list[Line]:
            benches = [PackBench(args.shape, method, n, experts) for n in args.threads]
            return [bench.line(args.cpus) for bench in benches]

        memory = len(args.threads) * experts * args.shape.weights * bits / 8
        made.append(Setup(f"{method.name} packing", memory, build))
    return made


def _loads(args: argparse.Namespace, ceilings: Ceilings, cache: int) -> list[Setup]:
    from loading import Files, LoadBench  # needs safetensors, which the other routines do not

    made = []
    layers = args.layers or 1
    weights = layers * args.shape.experts * args.shape.weights
    stored: dict[str, Files] = {}  # by the type of the stored weights
    for method in _methods(args):
        for source in args.sources if method.dense else [method.name]:

            def build(
                stack: ExitStack,
                note: Callable[[str], None],
                method: Method = method,
                source: str = source,
            ) -> list[Line]:
                if source not in stored:
                    like = METHODS.get(source, METHODS["BF16"])
                    stored[source] = Files(args.shape, like, source, layers)
                lines = []
                for threads in args.threads:
                    bench = LoadBench(args.shape, method, stored[source], source, threads, layers)
                    lines += [bench.line(args.cpus, name == "cold") for name in args.page_cache]
                return lines

            # Files in the page cache may be evicted, packed weights may not.
            made.append(Setup(f"{method.name} loading", weights * method.bits / 8, build))
    return made


def _steps(args: argparse.Namespace, ceilings: Ceilings, cache: int) -> list[Setup]:
    """All sides of a rank together, since they are compared with each other."""
    made = []
    for rank in args.ranks:
        for table in args.tables:
            for threads in args.threads:

                def build(
                    stack: ExitStack,
                    note: Callable[[str], None],
                    rank: int = rank,
                    table: str = table,
                    threads: int | None = threads,
                ) -> list[Line]:
                    setting = Setting(
                        args.shape, rank, table, threads, args.cpus, args.tokens, args.peer
                    )
                    known = ceilings.of(args.cpus)
                    return training_lines(setting, args.methods, args.peft, known, stack, note)

                memory = memory_needed(args.shape, rank, args.methods, args.peft)
                made.append(Setup(f"training, rank {rank}, {table}", memory, build))
    return made
