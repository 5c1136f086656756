"""Times what it takes to bring packed experts to a GPU: registration, copies, and unpacking.

    python benchmarks/streaming.py --json FILE

By default with the shape of Qwen3-30B-A3B. "copy": the packed bytes of a layer, alone; "unpack":
the layer's weights from memory of the GPU, alone; "stream": layers one after the other, copies and
unpacking side by side as `ExpertStreamer` does it, per layer. "bound" is the time of the copies at
the measured speed of the bus. Weights are random bytes, which take as long as any others.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from machine import about
from outputs import output_file, save_result

from kt_kernel import KTMoEWrapper
from kt_kernel.device.backend import CudaBackend
from kt_kernel.device.streaming.lane import CopyLane
from kt_kernel.device.streaming.streamer import ExpertStreamer
from kt_kernel.device.streaming.unpack import PackedMatrix
from kt_kernel.runtime.variant import native
from kt_kernel.weights.formats import LayerForm, WeightForm, all_formats

CUDA = torch.device("cuda", 0)
METHODS = ["BF16", "AMXINT8", "INT4_G32"]


def milliseconds(call: Callable[[], Any], repetitions: int = 10) -> float:
    """Median, from event to event."""
    taken = []
    for _ in range(repetitions + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return sorted(taken[2:])[repetitions // 2]


def unpacking(args: argparse.Namespace, sizes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """Milliseconds of a layer's gate, up and down, by format and by how many times 32 columns and
    warps a program has."""
    hidden, inter, experts = args.hidden, args.inter, args.experts
    out = [
        torch.empty(experts, *shape, dtype=torch.bfloat16, device=CUDA)
        for shape in ((inter, hidden), (hidden, inter))
    ]
    rows = []
    for format in all_formats():
        if args.formats and format.name not in args.formats:
            continue
        form = WeightForm(format, 32 if format.grouped else 0)
        if hidden % form.column_unit or inter % form.column_unit:
            continue
        made = []
        for to in out:
            tiles, tile_bytes = native().packed_shape(*form.core, *to.shape[1:])
            packed = torch.randint(
                256, (experts, tiles * tile_bytes), dtype=torch.uint8, device=CUDA
            )
            made.append((PackedMatrix(form, *to.shape[1:], 0, tile_bytes), packed, to))
        gate, down = made

        def layer(parts: int, warps: int, gate: Any = gate, down: Any = down) -> None:
            for matrix, packed, to in (gate, gate, down):
                matrix.unpack(packed, to, parts=parts, warps=warps)

        taken = {f"{p}x{w}": milliseconds(lambda p=p, w=w: layer(p, w)) for p, w in sizes}
        moved = 2 * gate[1].nbytes + down[1].nbytes + 2 * out[0].nbytes + out[1].nbytes
        best = min(taken, key=taken.__getitem__)
        rows.append(
            {"format": str(form), "ms": taken, "GB/s": moved / taken[best] / 1e6, "best": best}
        )
        print(f"unpack {form}: {taken} ms, best {rows[-1]['GB/s']:.0f} GB/s", flush=True)
    return rows


def model(method: str, args: argparse.Namespace) -> list[Any]:
    """Layers with random weights: of few experts, which are loaded into all slots."""
    few = 2
    gate, up = (torch.randn(few, args.inter, args.hidden).bfloat16() * 0.02 for _ in "gu")
    down = torch.randn(few, args.hidden, args.inter).bfloat16() * 0.02
    layers = []
    for i in range(args.layers):
        layer = KTMoEWrapper(i, args.experts, 8, args.hidden, args.inter, method=method)
        for slot in range(args.experts):
            layer.load_expert(slot, *(w[slot % few] for w in (gate, up, down)))
        layer.finish_loading()
        layers.append(layer)
    return layers


def streaming(method: str, args: argparse.Namespace) -> dict[str, Any]:
    packed = [layer.packed_experts() for layer in model(method, args)]
    first = packed[0]
    backend, lane = CudaBackend(CUDA), CopyLane(CUDA)
    total = sum(part.nbytes for experts in packed for part in experts.parts)
    start = time.perf_counter()
    for experts in packed:
        experts.register(backend)
    registration = time.perf_counter() - start
    streamer = ExpertStreamer(lane, args.memory << 20, first)
    room, layer_bytes = streamer.room(first), first.expert_bytes * args.experts
    staged = [
        torch.empty(args.experts, part.expert_bytes, dtype=torch.uint8, device=CUDA)
        for part in first.parts
    ]

    def copy() -> None:
        for part, to in zip(first.parts, staged, strict=True):
            to.copy_(part.memory, non_blocking=True)

    def all_layers() -> None:
        for experts in packed:
            for _ in streamer.stream(experts, experts.held):
                pass

    def scattered() -> None:
        for experts in packed:
            for _ in streamer.stream(experts, experts.held[::2]):
                pass

    copied = milliseconds(copy)
    bus = layer_bytes / copied / 1e6
    started = time.perf_counter()
    all_layers()
    host = (time.perf_counter() - started) / args.layers * 1e3
    torch.cuda.synchronize()
    row = {
        "method": method,
        "form": str(LayerForm(*(getattr(first.parts[0], m).form for m in ("gate", "up", "down")))),
        "registered GB/s": total / registration / 1e9,
        "layer MB": layer_bytes / 1e6,
        "experts in a group": room,
        "copy ms": copied,
        "bus GB/s": bus,
        "stream ms": milliseconds(all_layers, 5) / args.layers,
        "every other expert ms": milliseconds(scattered, 5) / args.layers,
        "host ms": host,
    }
    row["share of bound"] = copied / row["stream ms"]
    print(json.dumps(row), flush=True)
    for experts in packed:
        experts.release()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inter", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--memory", type=int, default=1024, help="MB on the GPU")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    parser.add_argument("--formats", nargs="*", help="default: all that fit the shape")
    parser.add_argument(
        "--sizes", nargs="+", default=["2x4", "4x4", "4x8", "8x4", "8x8"], help="parts x warps"
    )
    parser.add_argument("--json", type=output_file)
    args = parser.parse_args()
    sizes = [(int(p), int(w)) for p, w in (size.split("x") for size in args.sizes)]
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **about(),
        "gpu": torch.cuda.get_device_name(),
        "shape": {name: getattr(args, name) for name in ("hidden", "inter", "experts", "layers")},
        "unpacking": unpacking(args, sizes),
        "streaming": [streaming(method, args) for method in args.methods],
    }
    if args.json:
        save_result(args.json, result)


if __name__ == "__main__":
    main()
