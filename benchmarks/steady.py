"""Decodes with served engines in turn on one GPU, and measures how steady each one is.

Also measures how much an engine that is stopped in the middle of a step slows down another one.

    python benchmarks/steady.py --engine sglang --model FOLDER --variant now=/path/to/site \\
        --variant before=/path/to/other/site --rounds 20 --json FILE

A variant is a folder to put first on PYTHONPATH, with the kt-moe to measure. After an @, it may
have its own arguments in JSON: NAME=FOLDER@'{"kt_cpuinfer": 12}'. All engines are started together.
While one decodes, the processes of the others are stopped. The order of turns is reversed from
round to round. A round is one request of --steps tokens with default settings, timed from its first
token to its last, so that neither the prompt nor the engine's start is part of it. Every second
round also times prompts of --prompts tokens up to their first token.

Then each variant in turn is stopped in the middle of a decoding step while the first variant
decodes --beside more rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from outputs import output_file, save_result

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


# ---- In an engine's process: JSON lines in, JSON lines out.


def sglang_tokens(model: str, arguments: dict[str, Any]) -> Callable[[list[int], int], Iterator]:
    import sglang

    engine = sglang.Engine(model_path=model, skip_tokenizer_init=True, random_seed=0, **arguments)

    def tokens(prompt: list[int], steps: int) -> Iterator[int]:
        sampling = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
        for chunk in engine.generate(input_ids=prompt, sampling_params=sampling, stream=True):
            yield chunk["meta_info"]["completion_tokens"]

    return tokens


def vllm_tokens(model: str, arguments: dict[str, Any]) -> Callable[[list[int], int], Iterator]:
    from vllm import LLM, SamplingParams

    engine = LLM(model, skip_tokenizer_init=True, seed=0, **arguments).llm_engine
    requests = iter(range(1 << 30))

    def tokens(prompt: list[int], steps: int) -> Iterator[int]:
        sampling = SamplingParams(
            temperature=0, max_tokens=steps, min_tokens=steps, ignore_eos=True, detokenize=False
        )
        engine.add_request(str(next(requests)), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                yield len(output.outputs[0].token_ids)

    return tokens


def worker() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # sends the engine's output to the log
    spec = json.loads(sys.stdin.readline())
    make = {"sglang": sglang_tokens, "vllm": vllm_tokens}[spec["engine"]]
    tokens = make(spec["model"], spec["arguments"])
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        choose = random.Random(job["seed"])
        prompt = [choose.randrange(2, spec["vocabulary"]) for _ in range(job["prompt"])]
        start = time.monotonic()
        seen = [(time.monotonic(), count) for count in tokens(prompt, job["steps"])]
        (begin, first), (end, last) = seen[0], seen[-1]
        found = {
            "tokens_per_second": (last - first) / (end - begin),
            "first_token_ms": 1e3 * (begin - start),
        }
        print(json.dumps(found), file=answers)
    os._exit(0)


# ---- The turns.


class Engine:
    def __init__(self, name: str, place: str, args: argparse.Namespace) -> None:
        self.name = name
        self.rounds: list[float] = []
        self.prompts: dict[int, list[float]] = {length: [] for length in args.prompts}
        self.beside: dict[str, list[float]] = {}
        site, _, own = place.partition("@")
        self.own_arguments = json.loads(own or "{}")
        path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH", "")]))
        self.log = open(args.logs / f"{args.engine}-{name}.log", "w")  # noqa: SIM115 - stays open
        self.process = subprocess.Popen(
            [args.python, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        self.tell(
            engine=args.engine,
            model=str(args.model),
            arguments=args.arguments | self.own_arguments,
            vocabulary=args.vocabulary,
        )

    def tell(self, **job: Any) -> None:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended: {Path(self.log.name).read_text()[-3000:]}")
        return json.loads(line)

    def decode(self, steps: int, seed: int) -> float:
        self.tell(steps=steps, seed=seed, prompt=32)
        return self.answer()["tokens_per_second"]

    def prefill(self, seed: int) -> None:
        for length, times in self.prompts.items():
            self.tell(steps=2, seed=seed, prompt=length)
            times.append(self.answer()["first_token_ms"])

    def signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def end(self) -> None:
        # Not imported at the top; see `measure`.
        from kt_kernel.serving.server_process import end_group

        end_group(self.process.pid, patience=0)
        self.process.wait()

    def stop(self) -> None:
        time.sleep(0.5)  # an engine with overlapping steps has finished its last one by then
        self.signal(signal.SIGSTOP)

    def settle(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.decode(32, 0)


def summary(values: list[float]) -> dict[str, Any]:
    middle = median(values)
    return {
        "median": middle,
        "worst_of_median": min(values) / middle,
        "below_85_percent": sum(value < 0.85 * middle for value in values),
        "rounds": values,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    # Not imported at the top: the engines' processes run this file, too, with versions of kt-moe
    # that lack what `machine` imports.
    from machine import about

    engines = [Engine(name, site, args) for name, site in args.variant]
    try:
        for engine in engines:
            engine.answer()
        for engine in engines:
            engine.stop()
        for number in range(-1, args.rounds):  # the first round warms up
            for engine in engines if number % 2 else engines[::-1]:
                engine.signal(signal.SIGCONT)
                engine.settle(args.settle if number < 0 else 0.3)
                if number >= 0:
                    engine.rounds.append(engine.decode(args.steps, number))
                    if number % 2:
                        engine.prefill(number)
                engine.stop()
        first = engines[0]
        for engine in engines[1:]:
            engine.signal(signal.SIGCONT)
            engine.tell(steps=16 * args.steps, seed=1, prompt=32)
            time.sleep(1.5)
            engine.signal(signal.SIGSTOP)
            first.signal(signal.SIGCONT)
            first.settle(0.3)
            first.beside[engine.name] = [first.decode(args.steps, n) for n in range(args.beside)]
            first.stop()
            engine.end()
    finally:
        for engine in engines:
            if engine.process.poll() is None:
                engine.end()
    return {
        "about": about(),
        "date": datetime.date.today().isoformat(),
        "engine": args.engine,
        "arguments": args.arguments,
        "own_arguments": {engine.name: engine.own_arguments for engine in engines},
        "steps": args.steps,
        "tokens_per_second": {engine.name: summary(engine.rounds) for engine in engines},
        "first_token_ms": {
            engine.name: {length: median(times) for length, times in engine.prompts.items()}
            for engine in engines
            if args.rounds > 1
        },
        "beside_one_stopped_in_a_step": first.beside,
    }


def pair(text: str) -> tuple[str, str]:
    name, _, site = text.partition("=")
    return name, site


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engine", choices=["sglang", "vllm"], required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--vocabulary", type=int, default=32768, help="size (default: synthetic's)")
    parser.add_argument("--arguments", type=json.loads, default={})
    parser.add_argument("--variant", type=pair, action="append", required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=192)
    parser.add_argument("--prompts", type=int, nargs="*", default=[])
    parser.add_argument("--settle", type=float, default=6)
    parser.add_argument("--beside", type=int, default=5)
    parser.add_argument("--logs", type=Path, default=Path("/tmp"))
    parser.add_argument("--json", type=output_file)
    args = parser.parse_args()
    found = measure(args)
    for name, row in found["tokens_per_second"].items():
        print(
            f"{name}: median {row['median']:.0f} tokens/s, worst round "
            f"{row['worst_of_median']:.0%} of it, {row['below_85_percent']} of "
            f"{len(row['rounds'])} below 85%"
        )
        if args.prompts:
            times = found["first_token_ms"][name].items()
            print("  prompts:", ", ".join(f"{length} tokens {ms:.0f} ms" for length, ms in times))
    for name, values in found["beside_one_stopped_in_a_step"].items():
        print(f"beside {name}, stopped in a step: {', '.join(f'{v:.0f}' for v in values)} tokens/s")
    if args.json:
        save_result(args.json, found)


if __name__ == "__main__":
    if "--worker" in sys.argv:
        worker()
    else:
        main()
