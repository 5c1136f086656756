"""SGLang for cache.py. The model runs in the process of SGLang's scheduler, which gets requests
through a pipe: a method of `SchedulerModel` and its arguments."""

from __future__ import annotations

import argparse
import json
import os
import random
import threading
import time
import traceback
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cache_model import Model, kt_options
from in_memory import VOCABULARY
from prompts import ENGINES
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.scheduler import Scheduler

RUN, ERROR, ANSWER = "run", "error", "answer"


class SchedulerModel(Model):
    """Also notes when the scheduler has processed the results of its batches."""

    def __init__(self, args: argparse.Namespace, pipe: Connection) -> None:
        super().__init__(args, self._ask_to_run)
        self._pipe, self._launched, self._processed = pipe, 0, 0
        self._decoded: list[tuple[float, int]] = []  # when, and how many requests
        launch, process = Scheduler.run_batch, Scheduler.process_batch_result

        def run_batch(*given: Any, **named: Any) -> Any:
            self._launched += 1
            return launch(*given, **named)

        def process_batch_result(this: Any, batch: Any, *given: Any, **named: Any) -> Any:
            found = process(this, batch, *given, **named)
            rows = batch.batch_size() if batch.forward_mode.is_decode() else 0
            self._decoded.append((time.perf_counter(), rows))
            self._processed += 1
            return found

        Scheduler.run_batch, Scheduler.process_batch_result = run_batch, process_batch_result

    def _ask_to_run(self) -> None:
        """The other side decodes some tokens, for which it sends requests, too."""
        self._pipe.send((RUN, None))
        self.answer()

    def begin_times(self) -> None:
        self._decoded.clear()

    def times(self, streams: int) -> list[float]:
        """Seconds between batches with a token of every stream. Waits for the batch that SGLang has
        launched before it knew that all requests have ended."""
        while self._processed < self._launched:
            time.sleep(1e-4)
        pairs = zip(self._decoded, self._decoded[1:], strict=False)
        return [now - last for (last, a), (now, b) in pairs if a == b == streams]

    def answer(self) -> None:
        """Answers requests until there is an empty one."""
        while request := self._pipe.recv():
            name, given = request
            try:
                answer = ANSWER, getattr(self, name)(*given)
            except Exception:  # the one who asked raises it
                answer = ERROR, traceback.format_exc()
            self._pipe.send(answer)


def run_scheduler(
    args: argparse.Namespace, pipe: Connection, original: Any, *given: Any, **named: Any
) -> None:
    """A scheduler's process."""
    from kt_kernel.plugin_entrypoints.sglang.layer import KTEPWrapperMethod

    KTEPWrapperMethod._check_delivered = lambda _: None
    model = SchedulerModel(args, pipe)
    threading.Thread(target=model.answer, daemon=True).start()
    original(*given, **named)


class Sglang:
    """The engine. folder: of the model."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._pipe, theirs = Pipe()
        self._choose = random.Random(0)
        given: dict[str, Any] = dict(ENGINES["sglang"])
        given |= {"cuda_graph_max_bs_decode": 16, "cuda_graph_bs_decode": [1, 4, 16]}
        given |= {"context_length": 4096, "chunked_prefill_size": 2048}
        given |= {"mem_fraction_static": 0.8, "max_total_tokens": 65536}
        given |= {"max_running_requests": 16}
        given |= args.arguments
        os.environ["KT_CONFIG"] = json.dumps(kt_options(args))

        run = partial(run_scheduler, args, theirs, Engine.run_scheduler_process_func)
        Engine.run_scheduler_process_func = staticmethod(run)
        self._engine = Engine(
            model_path=str(folder), skip_tokenizer_init=True, random_seed=0, **given
        )
        theirs.close()

    def call(self, name: str, *given: Any) -> Any:
        """Calls a method of `SchedulerModel`."""
        self._pipe.send((name, given))
        while True:
            kind, found = self._pipe.recv()
            if kind == ANSWER:
                return found
            if kind == ERROR:
                raise RuntimeError(found)
            self.times(3)
            self._pipe.send(None)

    def times(self, steps: int, streams: int = 1) -> list[float]:
        """Seconds between the tokens, without the first of each request."""
        prompts = [
            [self._choose.randrange(2, VOCABULARY) for _ in range(8)] for _ in range(streams)
        ]
        self.call("begin_times")
        self._engine.generate(
            input_ids=prompts,
            sampling_params={"temperature": 0, "max_new_tokens": steps, "ignore_eos": True},
        )
        found: list[float] = self.call("times", streams)[: steps - 2]
        if 2 * len(found) < steps - 2:
            raise RuntimeError(f"{streams} requests of {steps} tokens ran together in {len(found)}")
        return found
