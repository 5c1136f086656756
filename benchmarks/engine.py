"""Serves a synthetic model with a stock engine, with and without kt-moe, and compares.

    python benchmarks/engine.py --engine vllm --python ENV/bin/python --json FILE
    python benchmarks/engine.py --engine sglang --python ENV/bin/python --hot 0 0.5 --deferral 0 2

The model has --layers layers with the experts of --shape (synthetic.py). Each configuration runs in
its own process, unless --together is given:

- "stock": everything on the GPU
- "kt": kt-moe with a part of the experts hot, and d experts of each token deferred
- "offload": the engine's --cpu-offload-gb, leaving as many bytes of weights on the GPU as "kt"

engine_run.py times prompts of --prefill tokens up to their first token, and decoding of --streams
requests at once.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from machine import about
from outputs import output_file, save_result
from route_table import VARIABLE
from shapes import Shape, parse_shape
from synthetic import config, make

from kt_kernel.routes.record import RouteRecord
from kt_kernel.serving.server_process import process_group

SCRIPT = Path(__file__).parent / "engine_run.py"


class Hot(NamedTuple):
    """A part of the experts, and the format of their weights on the GPU."""

    part: float
    format: str = "auto"

    @classmethod
    def parse(cls, text: str) -> Hot:
        """Of PART or PART:FORMAT."""
        part, _, form = text.partition(":")
        return cls(float(part), form or "auto")

    def __str__(self) -> str:
        return f"{self.part:.0%} hot" + (f" ({self.format})" if self.format != "auto" else "")


def expert_bytes(shape: Shape, layers: int) -> int:
    """Bytes of all experts in bfloat16."""
    return 2 * shape.weights * shape.experts * layers


def configurations(args: argparse.Namespace, model: Path) -> list[dict[str, Any]]:
    """The name and the engine's arguments of every configuration."""
    found: list[dict[str, Any]] = [] if args.no_stock else [{"name": "stock", "arguments": {}}]
    for hot in args.hot:
        for d, tokens in itertools.product(args.deferral, args.streaming):
            kt = {
                "method": args.method,
                "num_gpu_experts": round(hot.part * args.shape.experts),
                "max_deferred_experts_per_token": d,
                "gpu_prefill_token_threshold": tokens,
            }
            if hot.format != "auto":
                kt["hot_format"] = hot.format
            if args.cpuinfer:
                kt["cpuinfer"] = args.cpuinfer
            if args.weight_path:
                kt["weight_path"] = str(model)
            found.append(
                {
                    "name": f"kt {hot}, d={d}"
                    + (f", streamed from {tokens} tokens" if tokens else ""),
                    "hot": hot.part,
                    "hot_format": hot.format,
                    "deferred": d,
                    "streamed": tokens,
                    "arguments": {"kt": kt},
                }
            )
    for part in args.offload:
        size = expert_bytes(args.shape, args.layers) * (1 - part) / 2**30
        # SGLang accepts whole gigabytes only.
        size = size if args.engine == "vllm" else max(1, round(size))
        found.append(
            {
                "name": f"offload of {size:.3g} GiB",
                "hot": part,
                "arguments": {"cpu_offload_gb": size},
            }
        )
    return found


def measure(
    configurations: list[dict[str, Any]], args: argparse.Namespace, model: Path
) -> Iterator[dict[str, Any]]:
    """Yields the rows of the configurations as they finish. A failed one gives {"error": the end of
    the log}, and the next ones run in a new process."""
    rest = configurations
    while rest:
        group = rest if args.together else rest[:1]
        count = 0
        for found in run([one["arguments"] for one in group], args, model):
            if "error" not in found:
                found = {
                    "first_token_seconds": {n: median(t) for n, t in found["prefill"].items()},
                    "prefill_tokens_s": {
                        n: int(n) / median(t) for n, t in found["prefill"].items()
                    },
                    "decode_tokens_s": {
                        n: int(n) * args.steps / median(t) for n, t in found["decode"].items()
                    },
                    **found,
                }
            named = {key: value for key, value in group[count].items() if key != "arguments"}
            yield named | found
            count += 1
        rest = rest[count:]


def run(
    runs: list[dict[str, Any]], args: argparse.Namespace, model: Path
) -> Iterator[dict[str, Any]]:
    """Yields the results of engine_run.py, with one process for all. If a run fails, the last
    result is its error."""
    job = {
        "engine": args.engine,
        "model": str(model),
        "vocabulary": args.vocabulary,
        "runs": [args.arguments | one for one in runs],
        "prefill": args.prefill,
        "streams": args.streams,
        "steps": args.steps,
        "context": args.context,
        "rounds": args.rounds,
        "settle": args.settle,
    }
    with tempfile.TemporaryDirectory() as folder:
        job_file, results, log_file = (Path(folder) / n for n in ("job", "results", "log"))
        job_file.write_text(json.dumps(job))
        results.mkdir()
        if args.routes is not None:
            os.environ[VARIABLE] = str(args.routes.resolve())
        with process_group([args.python, SCRIPT, job_file, results], log_file) as process:
            for i in range(len(runs)):
                path, end = results / str(i), time.monotonic() + args.limit
                while not path.exists() and process.poll() is None and time.monotonic() < end:
                    time.sleep(0.2)
                if not path.exists():
                    yield {"error": log_file.read_text()[-2000:]}
                    return
                yield json.loads(path.read_text())
            process.wait()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--engine", required=True, choices=("vllm", "sglang"))
    add("--python", default=sys.executable, help="python with the engine and kt-moe")
    add("--shape", default="qwen3-30b-a3b", type=parse_shape, help="a name, or E,H,I,k")
    add("--layers", type=int, default=8)
    add("--vocabulary", type=int, default=32768)
    add("--model", type=Path, help="folder for the checkpoint, kept (default: a temporary one)")
    add("--method", default="BF16")
    add("--cpuinfer", type=int)
    add(
        "--weight-path",
        action="store_true",
        help="kt reads cold experts from the checkpoint itself, on all of its threads, instead of "
        "getting them from the engine one by one; large models start sooner",
    )
    add(
        "--hot",
        nargs="*",
        type=Hot.parse,
        default=[Hot(part) for part in (0, 0.25, 0.5, 0.75)],
        metavar="PART[:FORMAT]",
        help="parts of the experts, with a --kt-hot-format such as 0.5:packed",
    )
    add("--deferral", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    add(
        "--streaming",
        nargs="+",
        type=int,
        default=[0],
        help="tokens from which cold experts are streamed to the GPU; 0: never",
    )
    add(
        "--routes",
        type=Path,
        metavar="FILE",
        help="kt's layers get the routes of decoded tokens of this record "
        "(--record-kt-expert-routes), in place of a random router's",
    )
    add("--no-stock", action="store_true")
    add("--offload", nargs="*", type=float, help="the engine's own offload (default: as --hot)")
    add("--together", action="store_true", help="use one process, which starts sooner")
    add(
        "--arguments",
        default="{}",
        type=json.loads,
        help="more arguments of LLM or Engine, as JSON",
    )
    add("--prefill", nargs="+", type=int, default=[128, 2048, 8192])
    add("--streams", nargs="+", type=int, default=[1, 4, 16])
    add("--steps", type=int, default=64)
    add("--context", type=int, default=32)
    add("--rounds", type=int, default=3)
    add("--settle", type=float, default=12, help="seconds of decoding before anything is timed")
    add("--limit", type=float, default=900, help="seconds for one configuration")
    add("--json", type=output_file, help="save after each configuration")
    args = parser.parse_args(argv)
    if args.routes is not None:
        if not args.no_stock or args.offload:
            parser.error("--routes: only kt's layers get them; add --no-stock --offload")
        check_routes(parser, args)
    if args.offload is None:
        args.offload = [hot.part for hot in args.hot]
    for name, values, most in (
        ("--hot", [hot.part for hot in args.hot], 1),
        ("--offload", args.offload, 1),
        ("--deferral", args.deferral, args.shape.top_k),
    ):
        if not all(0 <= value <= most for value in values):
            parser.error(f"{name} {values}: 0 to {most}")
    return args


def check_routes(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """An error unless the record fits the model and has decoded tokens."""
    try:
        record = RouteRecord.load(args.routes)
    except (OSError, ValueError) as error:
        parser.error(f"--routes {args.routes}: {error}")
    found = record.model.num_experts, record.routes.shape[2]
    if found != (args.shape.experts, args.shape.top_k) or len(record.layers) < args.layers:
        parser.error(
            f"--routes {args.routes}: {found[1]} of {found[0]} experts in {len(record.layers)} "
            f"layers; accepted: {args.shape.top_k} of {args.shape.experts} in at least "
            f"{args.layers}"
        )
    if not len(record.decoded.passes):
        parser.error(f"--routes {args.routes}: no token has a pass of its own")


def line(name: str, row: dict[str, Any]) -> str:
    """A row of the printed table."""
    if "error" in row:
        return (
            f"| {name} | failed: {(row['error'].strip() or 'no output').splitlines()[-1][:100]} |"
        )
    gigabytes = "" if row["gpu_bytes"] is None else f"{row['gpu_bytes'] / 2**30:.1f}"
    cells = [f"{rate:.1f}" for rate in row["decode_tokens_s"].values()]
    cells += [f"{1e3 * time:.0f}" for time in row["first_token_seconds"].values()]
    return f"| {name} | {gigabytes} | " + " | ".join(cells) + " |"


def main() -> None:
    args = parse()
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **about(),
        "engine": args.engine,
        "shape": args.shape._asdict(),
        "layers": args.layers,
        "method": args.method,
        "steps": args.steps,
        "context": args.context,
        "rounds": args.rounds,
        "settle": args.settle,
        "weight_path": args.weight_path,
        "arguments": args.arguments,
        "routes": None if args.routes is None else args.routes.name,
        "model": config(args.shape, args.layers, args.vocabulary),
        "rows": [],
    }
    heads = [f"{n} streams, tokens/s" for n in args.streams]
    heads += [f"{n} tokens, ms to the first" for n in args.prefill]
    print("| | GPU GB | " + " | ".join(heads) + " |\n|" + " --- |" * (len(heads) + 2), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        model = make(args.model or Path(folder) / "model", args.shape, args.layers, args.vocabulary)
        for row in measure(configurations(args, model), args, model):
            result["rows"].append(row)
            print(line(row["name"], row), flush=True)
            if args.json:
                save_result(args.json, result)


if __name__ == "__main__":
    main()
