"""Times decoding in an engine with and without n-gram speculation, by the share of hot experts.

    ENV/bin/python benchmarks/speculative.py --engine vllm --json FILE

Run it in the engine's environment. Each configuration is a process: all are started before the
first one is timed, one after the other. The share "all" is the stock engine, without kt options.
The model has random experts, and predicts from each token the next number of a cycle, so that its
text is known. Two prompts of one request: in "accepted", the n-grams of the prompt (in SGLang, of
the same text generated before) continue like the text; in "rejected", they continue in another way
(in SGLang, there are none). Real texts are between the two. Each pass of the model computes the
drafted tokens, too, and their experts: with three, up to four times as many as for one token.

For each share of hot experts, "break_even" is the time of a pass with drafted tokens, all of them
rejected, relative to that of a token without speculation: speculation is faster if the model gets
more tokens than that from a pass.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import importlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from outputs import output_file, save_result

sys.path.insert(0, str(Path(__file__).parent))

import engine_run
import torch
from machine import about
from safetensors.torch import load_file, save_file
from shapes import Shape, parse_shape
from synthetic import make

from kt_kernel.serving.server_process import end_group

CYCLE, VOCABULARY = 64, 8192
STEPS, ROUNDS = 56, 3  # the text must not repeat itself
SECONDS = 4  # that a configuration is timed at most, on a GPU
# Lines of a configuration's process.
IMPORTED, READY, ROW = "BENCHMARK IMPORTED", "BENCHMARK READY", "BENCHMARK ROW "
PROMPTS = {
    "accepted": [CYCLE + i % CYCLE for i in range(3 * CYCLE)],
    "rejected": [CYCLE + 5 * i % CYCLE for i in range(3 * CYCLE)],
}
MODULES = {"vllm": "vllm.entrypoints.llm", "sglang": "sglang.srt.entrypoints.engine"}
ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {
        "attention_backend": "TRITON_ATTN",
        "moe_backend": "triton",
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": 1 << 28,
        "enable_prefix_caching": False,
        # Nothing is compiled, so that engines start sooner.
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 6, 8],
        },
    },
    "sglang": {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "moe_runner_backend": "triton",
        "disable_radix_cache": True,
        "disable_prefill_cuda_graph": True,
        "cuda_graph_max_bs_decode": 4,
        "mem_fraction_static": 0.6,  # of all memory, of which the other processes take some
        "max_total_tokens": 4096,
        "sleep_on_idle": True,  # it must not take a core while another process is timed
    },
}


def ngrams(engine: str, drafted: int) -> dict[str, Any]:
    """The engine's arguments for a number of drafted tokens; none for 0."""
    if not drafted:
        return {}
    if engine == "sglang":
        return {
            "speculative_algorithm": "NGRAM",
            "speculative_num_draft_tokens": drafted + 1,
            # One continuation, not a tree of several.
            "speculative_ngram_min_bfs_breadth": 1,
            "speculative_ngram_max_bfs_breadth": 1,
        }
    return {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": drafted,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
        }
    }


def make_predictable(model: Path, shape: Shape, layers: int) -> None:
    """Writes the model, with embeddings and an output layer so that token t is followed by the next
    one of its cycle, whatever the layers add."""
    if (model / "config.json").exists():
        return
    make(model, shape, layers, VOCABULARY)
    file = model / "rest.safetensors"
    tensors = load_file(file)
    base = torch.randn(VOCABULARY, len(tensors["model.norm.weight"]))
    token = torch.arange(VOCABULARY)
    following = token - token % CYCLE + (token + 1) % CYCLE
    output = torch.empty_like(base)
    output[following] = base * 0.02
    tensors["model.embed_tokens.weight"] = (base * 100).to(torch.bfloat16)
    tensors["lm_head.weight"] = output.to(torch.bfloat16)
    save_file(tensors, file, {"format": "pt"})


def seconds(generate: Any, forget: Callable[[], Any], prompt: list[int]) -> float:
    """For STEPS tokens after the first one. forget: removes earlier requests from caches."""
    times = []
    for steps in (1, STEPS + 1):
        forget()
        begin = time.monotonic()
        generate([prompt], steps)
        times.append(time.monotonic() - begin)
    return times[1] - times[0]


def time_one(args: argparse.Namespace, hot: float | None, drafted: int) -> None:
    """The process of a configuration. It waits for a line before it starts the engine, and for
    another one before it times it."""
    importlib.import_module(MODULES[args.engine])
    print(IMPORTED, flush=True)
    sys.stdin.readline()
    if hot is not None:
        kt = {"method": args.method, "num_gpu_experts": round(hot * args.shape.experts)}
        os.environ["KT_CONFIG"] = json.dumps(kt)
    given = ENGINES[args.engine] | args.arguments | ngrams(args.engine, drafted)
    generator = {"vllm": engine_run.vllm_generator, "sglang": engine_run.sglang_generator}
    start = time.monotonic()
    with generator[args.engine](str(args.model), given) as (generate, _, engine):

        def nothing() -> None: ...

        # SGLang has n-grams of the texts that it generated since, not of prompts.
        forget: dict[str, Callable[[], Any]] = dict.fromkeys(PROMPTS, nothing)
        if args.engine == "sglang":
            forget["rejected"] = engine.flush_cache
        row: dict[str, Any] = {"hot": hot, "drafted": drafted}
        row |= {"method": None if hot is None else args.method}
        for name, prompt in PROMPTS.items():
            seconds(generate, forget[name], prompt)
        row["start_seconds"] = time.monotonic() - start
        print(READY, flush=True)
        sys.stdin.readline()
        for name, prompt in PROMPTS.items():
            seconds(generate, forget[name], prompt)
            times = [seconds(generate, forget[name], prompt) for _ in range(ROUNDS)]
            row[name] = STEPS / median(times)
        print(ROW + json.dumps(row), flush=True)
        os._exit(0)  # engines take long to end


class Process:
    """Of a configuration. Its output goes to a file; ``heard`` gets its other lines."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.heard: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._log = log
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with open(self._log, "w") as file:
            for line in self._process.stdout:
                if line.startswith((IMPORTED, READY, ROW)):
                    self.heard.put(line.strip())
                else:
                    file.write(line)
                    file.flush()
        self.heard.put(None)

    def wait(self, limit: float) -> str | None:
        """The next line; None if the process has ended, or after ``limit`` seconds."""
        with contextlib.suppress(queue.Empty):
            return self.heard.get(timeout=max(limit, 0.1))
        return None

    def go(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which wait tells
            self._process.stdin.write("\n")
            self._process.stdin.flush()

    def said(self) -> str:
        """The end of its output."""
        return self._log.read_text()[-2000:] if self._log.exists() else ""

    def end(self) -> None:
        """With all processes that it started."""
        end_group(self._process.pid, patience=2)


def measured(args: argparse.Namespace, logs: Path) -> Iterator[dict[str, Any]]:
    """The row of each configuration, or what a process said that was not in time. Also makes the
    model, while the processes import the engine."""
    begun = time.monotonic()

    def left() -> float:
        return args.seconds - (time.monotonic() - begun)

    runs = [(hot, drafted) for drafted in args.drafted for hot in args.hot]
    processes = {}
    for hot, drafted in runs:
        one = json.dumps([hot, drafted])
        command = [
            sys.executable,
            __file__,
            *sys.argv[1:],
            "--model",
            str(args.model),
            "--one",
            one,
        ]
        processes[hot, drafted] = Process(command, logs / f"{hot} {drafted}.log")
    with open(args.lock or logs / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            with open(f"{args.model}.lock", "a") as making:  # two benchmarks may share it
                fcntl.flock(making, fcntl.LOCK_EX)
                make_predictable(args.model, args.shape, args.layers)
            print(f"model written after {time.monotonic() - begun:.0f} s", flush=True)
            timing = SECONDS * len(runs) * (2 if args.lock else 1)
            ready = _started(list(processes.values()), args.starts, lambda: left() - timing)
            print(f"started after {time.monotonic() - begun:.0f} s", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
            for ((hot, drafted), process), is_ready in zip(processes.items(), ready, strict=True):
                line = None
                if is_ready:
                    process.go()
                    line = process.wait(min(left(), 60))
                if line is not None and line.startswith(ROW):
                    yield json.loads(line.removeprefix(ROW))
                else:
                    yield {"hot": hot, "drafted": drafted, "error": process.said()}
        finally:
            for process in processes.values():
                process.end()


def _started(processes: list[Process], count: int, left: Callable[[], float]) -> list[bool]:
    """Starts their engines, ``count`` at a time. Returns which are ready in time."""
    with ThreadPoolExecutor(count) as pool:

        def start(process: Process) -> bool:
            if process.wait(left()) != IMPORTED:
                return False
            process.go()
            return process.wait(left()) == READY

        return list(pool.map(start, processes))


def share(text: str) -> float | None:
    return None if text == "all" else float(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument(
        "--shape", type=parse_shape, default="qwen3-30b-a3b", help="name or E,H,I,k"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--hot", type=share, nargs="+", default=[0.0, 0.5, None], help="or all")
    parser.add_argument("--drafted", type=int, nargs="+", default=[0, 3], help="tokens; 0: none")
    parser.add_argument("--arguments", type=json.loads, default={}, help="of the engine")
    parser.add_argument("--method", default="AMXINT8", help="of kt-moe")
    parser.add_argument("--model", type=Path, help="folder; made if it is empty")
    parser.add_argument("--starts", type=int, default=2, help="engines that start at a time")
    parser.add_argument(
        "--lock", type=Path, help="a file: of two benchmarks with it, one is timed at a time"
    )
    parser.add_argument("--json", type=output_file, required=True)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        return time_one(args, *args.one)
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **about(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "engine": args.engine,
        "engine_version": version(args.engine),
        "shape": args.shape._asdict(),
        "layers": args.layers,
    }
    result["rows"] = rows = []
    with tempfile.TemporaryDirectory() as folder:
        args.model = args.model or Path(folder) / "model"
        for row in measured(args, Path(folder)):
            plain = [
                one
                for one in rows
                if one["hot"] == row["hot"] and not one["drafted"] and "error" not in one
            ]
            if row["drafted"] and plain and "error" not in row:
                row["break_even"] = plain[0]["rejected"] / row["rejected"]
            print(json.dumps(row), flush=True)
            rows.append(row)
            save_result(args.json, result)


if __name__ == "__main__":
    main()
