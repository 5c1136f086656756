"""Runs in an engine's environment and times configurations of this engine.

    engine_run.py JOB.json FOLDER

JOB: {"engine": "vllm" or "sglang", "model": folder,
      "runs": [{arguments of LLM or Engine, and "kt": options of kt-moe}],
      "vocabulary", "prefill": [tokens of a prompt], "streams": [n], "steps": tokens decoded,
      "context": tokens before them, "rounds": n, "settle": seconds of decoding before}
FOLDER gets one file per run, named by its number: {"prefill": {tokens: [seconds to the first
token]}, "decode": {streams: [seconds for ``steps`` tokens of each]}, "gpu_bytes": or null,
"start_seconds"}. gpu_bytes counts torch's tensors for vLLM, which may share its process with
earlier runs, and everything in use on the first device for SGLang: compare within one engine only.

The time of decoding is that of generating ``steps`` + 1 tokens minus that of generating one, so
that neither the prompts nor the engine's start are part of it.
"""

import gc
import json
import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_WORKER_MULTIPROC_METHOD="spawn",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)

if "KT_BENCHMARK_ROUTES" in os.environ:
    # Here, because SGLang's process for the model begins with importing this file, too.
    from route_table import install_from_environment

    install_from_environment()


@contextmanager
def vllm_generator(model: str, arguments: dict, temperature: float = 0):
    import torch
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    held = [LLM(model, skip_tokenizer_init=True, seed=0, **arguments)]

    def generate(prompts: list[list[int]], steps: int) -> None:
        sampling = SamplingParams(
            temperature=temperature,
            max_tokens=steps,
            min_tokens=steps,
            ignore_eos=True,
            detokenize=False,
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = held[0].generate(inputs, sampling, use_tqdm=False)
        assert all(len(result.outputs[0].token_ids) == steps for result in found)

    # Of this process only, which may have served another configuration before.
    yield (
        generate,
        lambda: torch.cuda.memory_allocated() if torch.cuda.is_available() else None,
        held[0].llm_engine,
    )
    held.pop().llm_engine.engine_core.shutdown()
    gc.collect()
    cleanup_dist_env_and_memory()


@contextmanager
def sglang_generator(model: str, arguments: dict):
    import sglang
    import torch

    engine = sglang.Engine(model_path=model, skip_tokenizer_init=True, random_seed=0, **arguments)

    def generate(prompts: list[list[int]], steps: int) -> None:
        sampling = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
        found = engine.generate(input_ids=prompts, sampling_params=sampling)
        assert all(len(result["output_ids"]) == steps for result in found)

    def gpu_bytes() -> "int | None":  # of all processes, because SGLang's is another one
        if not torch.cuda.is_available():
            return None
        free, total = torch.cuda.mem_get_info(0)
        return total - free

    yield generate, gpu_bytes, engine
    engine.shutdown()


def timed(
    job: dict, generate: Callable[[list[list[int]], int], None], choose: random.Random
) -> dict:
    def seconds(count: int, tokens: int, steps: int) -> float:
        # New prompts each time, so that no prefix is cached.
        given = [
            [choose.randrange(2, job["vocabulary"]) for _ in range(tokens)] for _ in range(count)
        ]
        begin = time.monotonic()
        generate(given, steps)
        return time.monotonic() - begin

    for tokens in job["prefill"]:  # compile whatever the first use of a size compiles
        seconds(1, tokens, 1)
    end = time.monotonic() + job["settle"]  # engines are slower for a while after their start
    while True:
        for count in job["streams"]:
            seconds(count, job["context"], 16)
        if time.monotonic() > end:
            break
    prefill = {tokens: [] for tokens in job["prefill"]}
    decode = {count: [] for count in job["streams"]}
    for _ in range(job["rounds"]):
        for tokens, found in prefill.items():
            found.append(seconds(1, tokens, 1))
        for count, found in decode.items():
            first = seconds(count, job["context"], 1)
            found.append(seconds(count, job["context"], job["steps"] + 1) - first)
    return {"prefill": prefill, "decode": decode}


def main() -> None:
    job_path, folder = sys.argv[1:]
    with open(job_path) as file:
        job = json.load(file)
    generator = {"vllm": vllm_generator, "sglang": sglang_generator}[job["engine"]]
    choose = random.Random(0)
    for number, arguments in enumerate(job["runs"]):
        start = time.monotonic()
        os.environ.pop("KT_CONFIG", None)
        if "kt" in arguments:
            os.environ["KT_CONFIG"] = json.dumps(arguments.pop("kt"))
        with generator(job["model"], arguments) as (generate, gpu_bytes, _):
            started = time.monotonic() - start
            found = timed(job, generate, choose)
            found |= {"gpu_bytes": gpu_bytes(), "start_seconds": started}
            path = os.path.join(folder, str(number))
            with open(path + ".part", "w") as file:
                json.dump(found, file)
            os.rename(path + ".part", path)
            if number + 1 == len(job["runs"]):
                os._exit(0)  # engines take long to end, and everything is saved


if __name__ == "__main__":
    main()
