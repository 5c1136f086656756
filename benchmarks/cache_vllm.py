"""vLLM for cache.py. The model runs in this process."""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from cache_model import Model, kt_options
from in_memory import VOCABULARY
from prompts import ENGINES


class Vllm:
    """The engine. folder: of the model."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        from vllm import LLM, SamplingParams

        self.model = Model(args, lambda: self.times(3))
        given: dict[str, Any] = dict(ENGINES["vllm"])
        given["compilation_config"] |= {"cudagraph_capture_sizes": [1, 4, 16]}
        given |= {"max_model_len": 4096, "max_num_batched_tokens": 2048}
        given |= {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 2 << 30}
        given |= {"skip_tokenizer_init": True, "seed": 0}
        given |= args.arguments
        self._llm = LLM(str(folder), additional_config={"kt": kt_options(args)}, **given)
        self._params, self._choose, self._number = SamplingParams, random.Random(0), 0

    def call(self, name: str, *given: Any) -> Any:
        """Calls a method of `Model`."""
        return getattr(self.model, name)(*given)

    def times(self, steps: int, streams: int = 1) -> list[float]:
        """Seconds between the tokens, without the first of each request."""
        engine = self._llm.llm_engine
        params = self._params(
            temperature=0, max_tokens=steps, min_tokens=steps, ignore_eos=True, detokenize=False
        )
        for _ in range(streams):
            self._number += 1
            prompt = [self._choose.randrange(2, VOCABULARY) for _ in range(8)]
            engine.add_request(str(self._number), {"prompt_token_ids": prompt}, params)
        times, last = [], time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
            now = time.perf_counter()
            times.append(now - last)
            last = now
        return times[2:]
