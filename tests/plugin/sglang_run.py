"""Runs in the SGLang environment: one or more configurations, one after the other.

    sglang_run.py JOB.json RESULT.json

JOB: {"model": folder, "dtype": "float32", "device": {arguments of the engine, instead of those for
      the CPU}, "prompts": [[ids]], "steps": n or [for each prompt], "fork": whether to fork
      processes, "modules": to import first; forked processes have them,
      "runs": [{"name", "arguments": of the engine, "config": text of KT_CONFIG, "env": variables,
                "model", "prompts", "steps": other ones,
                "moved": the model gets random weights, those of experts moved by so many places;
                with it, "prompt": [[log-probabilities of the prompts' tokens but the first]],
                "before": prompts served first, of 1, 2, 3 and more steps; only in "stats",
                "fails_first": arguments with which the engine does not start, tried first,
                "requests": names in sglang_requests.py, or null for all: made afterwards}]}
RESULT: [{"name", "tokens": [[ids]], "logprobs": [[of these tokens]], "cached": [tokens of each
          prompt that were in the cache], "seconds", "stats": content of KT_STATS_FILE or null,
          "plugin": whether it was loaded, "failed": why the engine did not start at first,
          "requests": {name: answer}, "again": tokens after them}]; or {"name", "error"} for a run
          that raised.

The engine runs with a user's settings: radix cache, chunked prefill and overlapped schedule. It
spawns its processes, each of which imports everything again, for 10 s. With "fork", everything is
imported once, and a run's processes are forks of this one, which has no threads at that point.
"""

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback

from heap import freeze

os.environ.update(HF_HUB_OFFLINE="1")
CPU = {"device": "cpu", "attention_backend": "torch_native"}


def run(job: dict, one: dict, stats_path: str) -> dict:
    import sglang

    if "moved" in one:
        from kt_kernel.plugin_entrypoints.sglang import probe

        probe._set_weights(one["moved"])

    def begin(**arguments: object) -> sglang.Engine:
        given = {
            "model_path": one.get("model", job["model"]),
            "dtype": job.get("dtype", "float32"),
            "skip_tokenizer_init": True,
            "sleep_on_idle": True,
            "grammar_backend": "none",
            "max_total_tokens": 1024,
            "max_running_requests": 16,
            "mem_fraction_static": 0.6,  # of all memory, of which other processes may take some
            "random_seed": 0,
            "log_level": "info",
            **job.get("device", CPU),
        }
        return sglang.Engine(**given | arguments)

    failed = None
    if "fails_first" in one:
        try:
            begin(**one["fails_first"])
        except RuntimeError as error:
            failed = f"{type(error).__name__}: {error}"
    start = time.monotonic()
    engine = begin(**one.get("arguments", {}))
    try:
        prompts, steps = one.get("prompts", job["prompts"]), one.get("steps", job["steps"])

        def generate(prompts: list[list[int]], steps: list[int]) -> list:
            return engine.generate(
                input_ids=prompts,
                return_logprob=True,
                logprob_start_len=0 if "moved" in one else None,
                sampling_params=[
                    {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
                    for count in steps
                ],
            )

        if "before" in one:
            generate(one["before"], [*range(1, len(one["before"]) + 1)])
        started = time.monotonic()
        lengths = steps if isinstance(steps, list) else [steps] * len(prompts)
        results = generate(prompts, lengths)
        generated = time.monotonic()
        answers, again = {}, None
        if "requests" in one:
            from sglang_requests import make

            answers = make(engine, one["requests"])
            again = [result["output_ids"] for result in generate(prompts, lengths)]
        return {
            "name": one["name"],
            "tokens": [result["output_ids"] for result in results],
            "logprobs": [
                [step[0] for step in result["meta_info"]["output_token_logprobs"]]
                for result in results
            ],
            "prompt": [
                [step[0] for step in result["meta_info"].get("input_token_logprobs", ())[1:]]
                for result in results
            ],
            "cached": [result["meta_info"]["cached_tokens"] for result in results],
            "accepted": accepted_tokens(results),
            "failed": failed,
            "requests": answers,
            "again": again,
            "seconds": {"start": started - start, "generate": generated - started},
            "stats": _settled(stats_path),
            "plugin": "kt_kernel.plugin_entrypoints.sglang" in sys.modules,
        }
    finally:
        engine.shutdown()


def accepted_tokens(results: list) -> int | None:
    """Of speculative decoding: the first token comes from the prompt, and each pass of the model
    gives one more. None without it."""
    found = [result["meta_info"] for result in results]
    if any("spec_verify_ct" not in one for one in found):
        return None
    return sum(one["completion_tokens"] - 1 - one["spec_verify_ct"] for one in found)


def _settled(path: str) -> dict | None:
    """The counters once they no longer change. The worker writes them twice a second."""
    last = None
    for _ in range(20):
        if not os.path.exists(path):
            return None
        with open(path) as file:
            now = json.load(file)
        if now == last:
            return now
        last = now
        time.sleep(1.2)
    return last


def attempt(job: dict, one: dict, stats_path: str) -> dict:
    try:
        return run(job, one, stats_path)
    except Exception as error:
        traceback.print_exc()
        return {"name": one["name"], "error": f"{type(error).__name__}: {error}"}


def import_all() -> None:
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401

    freeze()
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda method, force: None


def attempt_in_fork(job: dict, one: dict, stats_path: str) -> dict:
    """An engine leaves threads behind, so it must not run in the process that forks the next
    one."""
    path = stats_path + ".answer"

    def write() -> None:
        answer = attempt(job, one, stats_path)
        with open(path, "w") as file:
            json.dump(answer, file)

    process = multiprocessing.Process(target=write)
    process.start()
    process.join()
    if not os.path.exists(path):
        return {"name": one["name"], "error": f"its process ended with {process.exitcode}"}
    with open(path) as file:
        return json.load(file)


def main() -> None:
    job_path, result_path = sys.argv[1:]
    with open(job_path) as file:
        job = json.load(file)
    for module in job.get("modules", []):
        importlib.import_module(module)
    if job.get("fork"):
        import_all()
    answers = []
    with tempfile.TemporaryDirectory() as folder:
        for i, one in enumerate(job["runs"]):
            os.environ["KT_STATS_FILE"] = stats_path = os.path.join(folder, f"stats{i}.json")
            os.environ.pop("KT_CONFIG", None)
            if "config" in one:
                os.environ["KT_CONFIG"] = one["config"]
            os.environ.update(one.get("env", {}))
            answer = (attempt_in_fork if job.get("fork") else attempt)(job, one, stats_path)
            for name in one.get("env", {}):
                del os.environ[name]
            answers.append(answer)
            print("RUN", one["name"], answer.get("error", "ok"), flush=True)
            with open(result_path, "w") as file:
                json.dump(answers, file)


if __name__ == "__main__":
    main()
