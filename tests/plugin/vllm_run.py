"""Runs in the vLLM environment: one or more configurations, one after the other.

    vllm_run.py JOB.json RESULT.json

JOB: {"model": folder, "dtype": "float32", "prompts": [[ids]], "steps": n or [for each prompt],
      "compile": false,
      "processes": whether the engine has its own process, vLLM's default; slower; default false,
      "modules": to import first,
      "inspect_here": whether to inspect model classes in this process; vLLM starts one for each
      class, which takes 10 s,
      "runs": [{"name": "...", "kt": {...} or null, "engine": {more arguments of LLM}, "compile",
                "environment": {variables}, "model", "prompts", "steps": other ones,
                "before": prompts served first, of 1, 2, 3 and more steps; not in the result,
                "requests": "some" or "all": further requests to the engine, see vllm_requests.py,
                "images": for each prompt, the file of the image in it,
                "leave": whether to end the process with it}]}
RESULT: [{"name", "tokens": [[ids]], "logprobs": [[of these tokens]], "seconds", "stats",
          "expert_calls", "forwards": of each layer, for the prompts alone,
          "cached": for each prompt, the number of tokens from the prefix cache,
          "requests": the answers, "again": the tokens after them,
          "hot_rows", "hybrid": class name of the expert layer}]; {"name", "error"} if it raised.
"""

import gc
import importlib
import json
import os
import sys
import time
import traceback

from heap import freeze
from vllm_inspect import inspect_model, mla_on_cpu
from vllm_requests import ask

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_WORKER_MULTIPROC_METHOD="spawn",
    VLLM_LOGGING_LEVEL="INFO",
    VLLM_ALLOW_INSECURE_SERIALIZATION="1",  # to inspect counters of ranks
)


def run(job: dict, one: dict) -> dict:
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    start = time.monotonic()
    arguments = {
        "skip_tokenizer_init": True,
        "dtype": job.get("dtype", "float32"),
        "enforce_eager": not one.get("compile", job.get("compile", False)),
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 256,  # of at least 16 tokens: enough, and quickly allocated
        "distributed_executor_backend": "uni",
        "seed": 0,
        "additional_config": {} if one["kt"] is None else {"kt": one["kt"]},
        **mla_on_cpu(),
    }
    llm = LLM(one.get("model", job["model"]), **arguments | one.get("engine", {}))
    if "before" in one:
        _generate(llm, one["before"], [*range(1, len(one["before"]) + 1)])
    before = llm.apply_model(inspect_model)[0]["stats"]  # counted during the start
    prompts, steps = one.get("prompts", job["prompts"]), one.get("steps", job["steps"])
    started = time.monotonic()
    counts = steps if isinstance(steps, list) else [steps] * len(prompts)
    results = _generate(llm, prompts, counts, one.get("images"))
    outputs = [result.outputs[0] for result in results]
    found = llm.apply_model(inspect_model)[0]
    asked = {}
    if "requests" in one:
        asked["requests"] = ask(llm, one["requests"])
        again = _generate(llm, prompts, counts)
        asked["again"] = [list(result.outputs[0].token_ids) for result in again]
    answer = {
        "name": one["name"],
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [
                step[token].logprob
                for step, token in zip(output.logprobs, output.token_ids, strict=True)
            ]
            for output in outputs
        ],
        "seconds": {"start": started - start, "generate": time.monotonic() - started},
        **{
            counter: [
                now.get(counter, 0) - then.get(counter, 0)
                for now, then in zip(found["stats"], before, strict=True)
            ]
            for counter in ("expert_calls", "forwards")
        },
        "cached": [result.num_cached_tokens for result in results],
        "accepted": accepted_tokens(llm),
        **asked,
        **found,
    }
    if one.get("leave"):
        return answer
    llm.llm_engine.engine_core.shutdown()
    del llm, results
    gc.collect()
    cleanup_dist_env_and_memory()
    return answer


def accepted_tokens(llm) -> int | None:
    """Of speculative decoding; None without it, or if statistics are off."""
    try:
        metrics = llm.get_metrics()
    except AssertionError:  # statistics are off
        return None
    name = "vllm:spec_decode_num_accepted_tokens"
    return next((metric.value for metric in metrics if metric.name == name), None)


def _generate(
    llm, prompts: list[list[int]], steps: list[int], images: list[str] | None = None
) -> list:
    from vllm import SamplingParams

    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    if images is not None:
        from PIL import Image

        for one, path in zip(given, images, strict=True):
            one["multi_modal_data"] = {"image": Image.open(path).convert("RGB")}
    return llm.generate(
        given,
        [
            SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=1
            )
            for count in steps
        ],
        use_tqdm=False,
    )


def main() -> None:
    job_path, result_path = sys.argv[1:]
    with open(job_path) as file:
        job = json.load(file)
    if not job.get("processes"):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for module in job.get("modules", []):
        importlib.import_module(module)
    if job.get("inspect_here"):
        from vllm.model_executor.models import registry

        registry._run_in_subprocess = lambda look: look()
    importlib.import_module("vllm.entrypoints.llm")
    freeze()
    answers = []
    for one in job["runs"]:
        os.environ.update(one.get("environment", {}))
        try:
            answers.append(run(job, one))
        except Exception as error:
            traceback.print_exc()
            answers.append({"name": one["name"], "error": f"{type(error).__name__}: {error}"})
        for variable in one.get("environment", {}):
            del os.environ[variable]
        print("RUN", one["name"], answers[-1].get("error", "ok"), flush=True)
        with open(result_path, "w") as file:
            json.dump(answers, file)
        if one.get("leave"):
            sys.stdout.flush()
            os._exit(0)


if __name__ == "__main__":
    main()
