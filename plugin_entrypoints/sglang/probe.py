"""SGLang: serves models one after the other and writes their log-probabilities, for kt model check.

    python -m kt_kernel.plugin_entrypoints.sglang.probe JOB.json RESULT.json

The files are those of `kt_kernel.serving.class_check`.
"""

import json
import os
from typing import Any

from kt_kernel.serving.class_check import run_job
from kt_kernel.serving.random_weights import fill

# By how many places experts are moved; set if the scheduler's process is to set random weights.
_MOVED = "KT_CHECK_MOVED"


def serve(run: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities of the prompts' tokens, and of `steps` greedy tokens after each."""
    from sglang.srt.entrypoints.engine import Engine

    for name in ("KT_CONFIG", _MOVED):
        os.environ.pop(name, None)
    if "moved" in run:
        os.environ[_MOVED] = str(run["moved"])
    if run["kt"] is not None:
        os.environ["KT_CONFIG"] = json.dumps(run["kt"])
    engine = Engine(
        model_path=run["model"],
        dtype=job["dtype"],
        skip_tokenizer_init=True,
        grammar_backend="none",
        max_total_tokens=2048,
        max_running_requests=4,
        mem_fraction_static=0.6,
        disable_radix_cache=True,
        disable_cuda_graph=True,
        disable_overlap_schedule=True,
        random_seed=0,
        device=job["device"],
        **job["arguments"],
    )
    try:
        results = engine.generate(
            input_ids=job["prompts"],
            return_logprob=True,
            logprob_start_len=0,
            sampling_params={"temperature": 0, "max_new_tokens": job["steps"], "ignore_eos": True},
        )
        found = [result["meta_info"] for result in results]
        return {
            # The first token has no log-probability.
            "prompt": [[one[0] for one in info["input_token_logprobs"][1:]] for info in found],
            "tokens": [result["output_ids"] for result in results],
            "decoded": [[one[0] for one in info["output_token_logprobs"]] for info in found],
        }
    finally:
        engine.shutdown()


def _set_weights(moved: int) -> None:
    """Makes SGLang's loader set random weights instead of reading a checkpoint."""
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.loader import DefaultModelLoader

    # Named with _ before SGLang 0.5.21.
    derive = getattr(loader, "post_load_weights", None) or loader._post_load_weights
    original = DefaultModelLoader.load_weights_and_postprocess

    def load(model: Any, weights: Any, target_device: Any) -> None:
        def set_all(weights: Any) -> None:
            fill(model, lambda layer: layer.num_experts, moved)
            derive(model)

        model.load_weights = set_all
        original(model, weights, target_device)

    DefaultModelLoader.load_weights_and_postprocess = staticmethod(load)


if __name__ == "__main__":
    run_job(serve)
elif __name__ == "__mp_main__" and _MOVED in os.environ:  # a process that SGLang has started
    _set_weights(int(os.environ[_MOVED]))
