"""An engine that answers requests of prompts_turns.py: JSON lines on standard input and output.

    prompts_worker.py SPEC.json

SPEC: a JSON object with "engine", "model", "arguments" besides those of prompts.py (null removes
one), "config" of kt-moe (or null), and "folder", which gets the engine's log. First {"ready":
seconds} is written, then an answer to each request:

- {"do": "warm", "tokens": [n], "modes": [name]}
- {"do": "prompts", "tokens": [n], "modes": [name], "rounds": n}: as `Bench.first_token`
- {"do": "logprobs", "modes": [name]}: as `prompts_more.logprobs`
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import engine_run  # first: it sets what the engines read
import prompts  # it installs the modes, also in the processes that an engine spawns
import stream_gates
from prompts_more import logprobs

if stream_gates.VARIABLE in os.environ:
    stream_gates.install(Path(os.environ[stream_gates.VARIABLE]))


def answer(job: dict[str, Any], engine: str, bench: prompts.Bench, served: Any) -> Any:
    """Does what a request asks for."""
    if job["do"] == "logprobs":
        return logprobs(engine, bench, served, job["modes"])
    if job["do"] == "warm":
        return bench.warm(job["tokens"], job["modes"])
    return bench.first_token(job["tokens"], job["modes"], job["rounds"])


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(spec["folder"])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if spec["config"] is not None:
        os.environ["KT_CONFIG"] = json.dumps(spec["config"])
    begin = time.monotonic()
    generator = {"vllm": engine_run.vllm_generator, "sglang": engine_run.sglang_generator}
    arguments = prompts.ENGINES[spec["engine"]] | spec["arguments"]
    arguments = {name: value for name, value in arguments.items() if value is not None}
    with generator[spec["engine"]](spec["model"], arguments) as (generate, _, served):
        answers.write(json.dumps({"ready": time.monotonic() - begin}) + "\n")
        bench = prompts.Bench(generate, folder / "mode")
        for line in sys.stdin:
            try:
                found = {"found": answer(json.loads(line), spec["engine"], bench, served)}
            except Exception as error:  # the others go on
                traceback.print_exc()
                found = {"error": repr(error)[-1000:]}
            answers.write(json.dumps(found) + "\n")
        os._exit(0)  # engines take long to end, and everything is saved


if __name__ == "__main__":
    main()
