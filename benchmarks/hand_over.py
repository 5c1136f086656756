"""Times what a layer adds to a CUDA stream besides the experts' work: submit, the CPU, collect.

    python benchmarks/hand_over.py --json FILE

Transfers and the routing of the GPU's experts are included. With "nothing", the routes name no
expert, so the CPU has nothing to compute. With "one expert", all routes name one small expert
(I = 64), so the CPU threads start and synchronise. Reports medians between events for one eager
call, for 16 eager layers, and for 16 layers in a replayed CUDA graph, each divided by the number of
layers; and the time that a layer's eager calls take on the host.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
from machine import about
from outputs import output_file, save_result

from kt_kernel import KTMoEWrapper, model_scope

LAYERS, EXPERTS, TOP_K = 16, 4, 8
WORK = {"nothing": -1, "one expert": 2}


def model(hidden: int, threads: int | None) -> list[Any]:
    with model_scope():
        layers = [
            KTMoEWrapper(
                i,
                EXPERTS,
                TOP_K,
                hidden,
                64,
                cpuinfer_threads=threads,
                method="BF16",
                num_gpu_experts=2,
            )
            for i in range(LAYERS)
        ]
    w = torch.zeros(64, hidden, dtype=torch.bfloat16)
    for layer in layers:
        for expert in range(2, EXPERTS):
            layer.load_expert(expert, w, w, w.T.contiguous())
        layer.finish_loading()
    return layers


def times(call: Callable[[], Any], repetitions: int, share: int = 1) -> dict[str, float]:
    """Median and 99th percentile in microseconds of one of the ``share`` layers in a call."""
    taken = []
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1e3 / share)
    return median_and_p99(taken)


def on_host(call: Callable[[], Any], repetitions: int) -> dict[str, float]:
    """As `times`, for the time of a call on its thread. Makes a few calls at a time, so that no
    queue fills up."""
    taken = []
    for i in range(repetitions):
        start = time.perf_counter()
        call()
        taken.append((time.perf_counter() - start) * 1e6)
        if i % 8 == 7:
            torch.cuda.synchronize()
    return median_and_p99(taken)


def median_and_p99(taken: list[float]) -> dict[str, float]:
    taken.sort()
    return {"median": taken[len(taken) // 2], "p99": taken[int(len(taken) * 0.99)]}


def measure(
    layers: list[Any], hidden: int, tokens: int, expert: int, repetitions: int
) -> dict[str, Any]:
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    hot = torch.zeros_like(x)
    ids = torch.full((tokens, TOP_K), expert, dtype=torch.int32, device="cuda")
    weights = torch.rand(tokens, TOP_K, device="cuda")
    slot_map = torch.tensor([0, 1, -1, -1], dtype=torch.int32, device="cuda")
    stream = torch.cuda.Stream()

    def one(layer: Any) -> None:
        layer.submit_and_split(x, ids, weights, stream, slot_map=slot_map, cold_slot=0)
        layer.sync_and_add(x, stream, hot=hot)

    def every() -> None:
        for layer in layers:
            one(layer)

    with torch.cuda.stream(stream):
        for _ in range(20):
            every()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            every()
        eager = times(lambda: one(layers[0]), repetitions)
        queued = times(every, repetitions // LAYERS + 1, LAYERS)
        replayed = times(graph.replay, repetitions, LAYERS)
        host = on_host(lambda: one(layers[0]), repetitions)
    return {
        "hidden": hidden,
        "tokens": tokens,
        "eager": eager,
        "eager, 16 layers": queued,
        "graph": replayed,
        "host": host,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", nargs="+", type=int, default=[2048, 7168])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 64])
    parser.add_argument("--threads", type=int, help="default: kt_kernel's choice")
    parser.add_argument("--repetitions", type=int, default=1000)
    parser.add_argument("--json", type=output_file)
    args = parser.parse_args()
    torch.cuda.init()  # before the layers, which leave cores to a process that uses a GPU
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **about(),
        "gpu": torch.cuda.get_device_name(),
        "rows": [],
    }
    for hidden in args.hidden:
        layers = model(hidden, args.threads)
        for tokens, (work, expert) in itertools.product(args.tokens, WORK.items()):
            row = {"work": work} | measure(layers, hidden, tokens, expert, args.repetitions)
            result["rows"].append(row)
            print(
                f"H={hidden} T={tokens}, {work}: "
                + ", ".join(
                    f"{name} {row[name]['median']:.1f} us (99% {row[name]['p99']:.1f})"
                    for name in ("eager", "eager, 16 layers", "graph", "host")
                ),
                flush=True,
            )
    if args.json:
        save_result(args.json, result)


if __name__ == "__main__":
    main()
