"""Runs inside an engine's environment: one configuration of one engine, timed from within.

    engine_run.py JOB.json RESULT.json

JOB: {"engine": "vllm" or "sglang", "model": folder, "arguments": {of LLM or Engine}, "vocabulary",
      "prefill": [tokens of a prompt], "streams": [n], "steps": tokens decoded, "context": tokens
      before them, "rounds": n}
RESULT: {"prefill": {tokens: [seconds to the first token]}, "decode": {streams: [seconds for
         ``steps`` tokens of each]}, "gpu_bytes": used on the device, or null, "start_seconds"}

Decoding is the time of a generation of ``steps`` + 1 tokens less that of one of a single token, so
that neither the prompts nor the engine's start are part of it.
"""

import json
import os
import random
import sys
import time

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_WORKER_MULTIPROC_METHOD="spawn",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)


def vllm_generator(job: dict):
    from vllm import LLM, SamplingParams

    llm = LLM(job["model"], skip_tokenizer_init=True, seed=0, **job["arguments"])

    def generate(prompts: list[list[int]], steps: int) -> None:
        sampling = SamplingParams(
            temperature=0, max_tokens=steps, min_tokens=steps, ignore_eos=True, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = llm.generate(inputs, sampling, use_tqdm=False)
        assert all(len(result.outputs[0].token_ids) == steps for result in found)

    return generate


def sglang_generator(job: dict):
    import sglang

    engine = sglang.Engine(
        model_path=job["model"], skip_tokenizer_init=True, random_seed=0, **job["arguments"]
    )

    def generate(prompts: list[list[int]], steps: int) -> None:
        sampling = {"temperature": 0, "max_new_tokens": steps, "ignore_eos": True}
        found = engine.generate(input_ids=prompts, sampling_params=sampling)
        assert all(len(result["output_ids"]) == steps for result in found)

    return generate


def gpu_bytes() -> "int | None":
    """Bytes in use on the first device, by all processes."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def main() -> None:
    job_path, result_path = sys.argv[1:]
    with open(job_path) as file:
        job = json.load(file)
    choose = random.Random(0)
    start = time.monotonic()
    generate = {"vllm": vllm_generator, "sglang": sglang_generator}[job["engine"]](job)
    started = time.monotonic() - start

    def prompts(count: int, tokens: int) -> list[list[int]]:
        # New ones each time: no part of a prompt is in a cache.
        return [[choose.randrange(2, job["vocabulary"]) for _ in range(tokens)]
                for _ in range(count)]  # fmt: skip

    def seconds(count: int, tokens: int, steps: int) -> float:
        given = prompts(count, tokens)
        begin = time.monotonic()
        generate(given, steps)
        return time.monotonic() - begin

    for count in job["streams"]:  # what is compiled at the first use of a size
        seconds(count, job["context"], 2)
    prefill = {tokens: [] for tokens in job["prefill"]}
    decode = {count: [] for count in job["streams"]}
    for _ in range(job["rounds"]):
        for tokens, found in prefill.items():
            found.append(seconds(1, tokens, 1))
        for count, found in decode.items():
            first = seconds(count, job["context"], 1)
            found.append(seconds(count, job["context"], job["steps"] + 1) - first)
    with open(result_path, "w") as file:
        json.dump({"prefill": prefill, "decode": decode, "gpu_bytes": gpu_bytes(),
                   "start_seconds": started}, file)  # fmt: skip
    os._exit(0)  # engines take long to end, and have nothing left to say


if __name__ == "__main__":
    main()
