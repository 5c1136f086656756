"""vLLM: serves models one after the other and writes their log-probabilities, for kt model check.

    python -m kt_kernel.plugin_entrypoints.vllm.probe JOB.json RESULT.json

The files are those of `kt_kernel.serving.class_check`. Run in a process of its own: vLLM is
configured by environment variables, and what a model leaves behind ends with the process.
"""

import gc
import os
from typing import Any

from kt_kernel.serving.class_check import run_job
from kt_kernel.serving.random_weights import fill

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")


def serve(run: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities of the prompts' tokens, and of `steps` greedy tokens after each."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.entrypoints.llm import LLM
    from vllm.sampling_params import SamplingParams

    if "moved" in run:
        _set_weights(run["moved"])
    prompts, steps = job["prompts"], job["steps"]
    llm = LLM(
        run["model"],
        skip_tokenizer_init=True,
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=256,
        gpu_memory_utilization=0.1 if job["device"] == "cuda" else 0.5,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
        seed=0,
        additional_config={} if run["kt"] is None else {"kt": run["kt"]},
        **job["arguments"],
    )
    wanted = SamplingParams(
        temperature=0,
        max_tokens=steps,
        ignore_eos=True,
        detokenize=False,
        logprobs=1,
        prompt_logprobs=1,
    )
    results = llm.generate([{"prompt_token_ids": p} for p in prompts], wanted, use_tqdm=False)
    answer = {
        "prompt": [
            [one[token].logprob for one, token in zip(r.prompt_logprobs[1:], p[1:], strict=True)]
            for r, p in zip(results, prompts, strict=True)
        ],
        "tokens": [list(r.outputs[0].token_ids) for r in results],
        "decoded": [
            [one[t].logprob for one, t in zip(o.logprobs, o.token_ids, strict=True)]
            for o in (r.outputs[0] for r in results)
        ],
    }
    llm.llm_engine.engine_core.shutdown()
    del llm, results
    gc.collect()
    cleanup_dist_env_and_memory()
    return answer


def _set_weights(moved: int) -> None:
    """Makes vLLM's loader set random weights instead of reading a checkpoint."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        fill(model, lambda layer: layer.moe_config.num_experts, moved)

    DefaultModelLoader.load_weights = load_weights


if __name__ == "__main__":
    run_job(serve)
