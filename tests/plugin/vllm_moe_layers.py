"""Runs in the vLLM environment: loads models, and computes only their MoE layers.

    vllm_moe_layers.py JOB.json RESULT.json

JOB: {"runs": [{"name", "model", "kt", "engine": arguments of vLLM, "inputs": file, "outputs": file
      to write}]}; the files have safetensors, see test_moe_layers.py.
RESULT: [{"name"}, or {"name", "error"} for a run that raised].
"""

import gc
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Any
from unittest import mock

import moe_layers_run
import torch
from vllm_inspect import mla_on_cpu

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_KIMI_K3_GEMM_AR="0",  # a kernel for GPUs
)


def compute_in_rank(worker: Any, one: dict) -> None:
    """Writes the outputs of a rank; with several, those of rank R to a file of their own."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    config = worker.vllm_config

    def compute(block: torch.nn.Module, x: torch.Tensor, **given: torch.Tensor) -> object:
        context = set_forward_context(None, config, num_tokens=len(x))
        with torch.inference_mode(), set_current_vllm_config(config), context:
            return block(x, **given)

    outputs = moe_layers_run.rank_outputs(one["outputs"], worker.rank)
    model = worker.get_model()
    moe_layers_run.compute_all(model, "routed_experts", compute, one | {"outputs": outputs})


def run(one: dict) -> None:
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    arguments = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
        "additional_config": {} if one["kt"] is None else {"kt": one["kt"]},
        **mla_on_cpu(),
    }
    config = EngineArgs(one["model"], **arguments | one["engine"]).create_engine_config()
    if config.parallel_config.tensor_parallel_size == 1:
        executor = UniProcExecutor(config)
    else:
        cpus = sorted(os.sched_getaffinity(0))  # one for each rank
        with mock.patch.dict(os.environ, VLLM_CPU_OMP_THREADS_BIND=f"{cpus[0]}|{cpus[-1]}"):
            executor = MultiprocExecutor(config)
    try:
        executor.collective_rpc(compute_in_rank, args=(one,))
    finally:
        executor.shutdown()
        del executor
        gc.collect()
        cleanup_dist_env_and_memory()


# Attention that the CPU has not. It is not called, so it is left out.
ATTENTION = {
    "vllm.model_executor.models.bailing_moe_linear": (
        "BailingMoELinearAttention",
        "BailingMoeV25MLAAttention",
    ),
    "vllm.model_executor.models.bailing_moe_v3": (
        "BailingMoeV3KimiDeltaAttention",
        "BailingMoeV3MLAAttention",
    ),
    "vllm.models.deepseek_v41.nvidia.model": ("DeepseekV4FlashMLAAttention",),
    "vllm.models.dots3_note.nvidia.model": (
        "Dots3NoteFullAttention",
        "Dots3NoteSlidingAttention",
    ),
    "vllm.models.inkling.nvidia.model": (
        "InklingAttention",
        "InklingConvState",
        "InklingShortConv",
    ),
    "vllm.models.glm5next.common.model": ("Glm5NextLinearAttention", "Glm5NextMLAAttention"),
    "vllm.models.kimi_k3.nvidia.model": (
        "KimiK3DeltaAttention",
        "KimiLinearGatedDeltaNetAttention",
        "MultiHeadLatentAttention",
    ),
}


class NoAttention(torch.nn.Module):
    def __init__(self, *given: object, **more: object) -> None:
        super().__init__()


def leave_attention_out() -> None:
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    for module, names in ATTENTION.items():
        for name in names:
            setattr(importlib.import_module(module), name, NoAttention)
    get_all_weights = DefaultModelLoader.get_all_weights

    def without_attention(loader: Any, config: Any, model: torch.nn.Module) -> Iterator[Any]:
        left_out = any(isinstance(module, NoAttention) for module in model.modules())
        for name, weight in get_all_weights(loader, config, model):
            if not (left_out and re.search(r"\.(self_attn|attention|attn|\w+_sconv)\.", name)):
                yield name, weight

    DefaultModelLoader.get_all_weights = without_attention


def select(
    logits: torch.Tensor,
    total: int,
    routed: int,
    top_k: int,
    shared: int,
    bias: torch.Tensor | None,
    scale: float,
    global_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Inkling's router weights and experts [T, k + shared]: a softmax of log-sigmoids."""
    logits = logits[:, :total]
    scores = logits[:, :routed].sigmoid()
    chosen = (scores if bias is None else scores + bias).topk(top_k).indices
    active = torch.cat((logits.gather(1, chosen), logits[:, routed:]), 1)
    weights = torch.nn.functional.logsigmoid(active).softmax(1) * scale
    if global_scale is not None:
        weights = weights * global_scale
    sinks = torch.arange(routed, total).expand(len(chosen), -1)
    return weights, torch.cat((chosen, sinks), 1).int()


def sinks(
    raw: torch.Tensor,
    alphas: torch.Tensor,
    gammas: torch.Tensor,
    ratios: torch.Tensor,
    count: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """SwiGLU of Inkling's shared experts, weighted, from products whose gates and ups alternate."""
    gate, up = raw.unflatten(1, (count, -1, 2)).float().unbind(-1)
    scale = alphas[:, None]
    out = torch.nn.functional.silu(gate * scale) * up * scale * (gammas * ratios)[..., None]
    return out.flatten(1).to(dtype)


def biased_topk(
    x: torch.Tensor, logits: torch.Tensor, bias: torch.Tensor, top_k: int, *given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V4's router weights and experts [T, k]. given: the scale is next to last."""
    scores = torch.nn.functional.softplus(logits.float()).sqrt()
    chosen = (scores + bias).topk(top_k).indices
    weights = scores.gather(1, chosen)
    return weights / weights.sum(1, keepdim=True) * given[-2], chosen.int()


def without_kernels() -> None:
    """Routing that needs AVX-512, and steps of Inkling that vLLM has on GPUs only."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router
    from vllm.models.inkling.nvidia import moe, ops

    cpu_router.biased_topk_cpu = biased_topk
    moe.inkling_gate_select = select
    moe._linear_with_fp32_out = lambda x, weight: x.float() @ weight.float().T
    ops.sink_silu_mul_epilogue = sinks


def import_dots() -> None:
    """Imports Dots3Note, whose attention needs a module for GPUs and whose class a tokenizer."""
    absent = [f"vllm.models.dots3_note.nvidia.{name}" for name in ("attention", "audio", "vision")]
    sys.modules |= dict.fromkeys(absent, mock.MagicMock())
    from vllm.models.dots3_note.nvidia import multimodal

    for name in absent:
        del sys.modules[name]
    multimodal.get_hf_file_to_dict = lambda *given: {multimodal.IMAGE_PAD: 130}


def build_partly() -> None:
    """Classes that would need a head with files of its own, or another runner than the CPU's."""
    from vllm.config import ModelConfig, VllmConfig
    from vllm.model_executor.models import clef_omni, longcat_flash_ngram

    ModelConfig.is_diffusion = False
    clef = clef_omni.ClefOmniForJointSchema
    clef.__init__ = super(clef, clef).__init__
    build = longcat_flash_ngram.LongcatFlashNgramForCausalLM.__init__

    def build_for_runner_2(self: object, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        with mock.patch.object(VllmConfig, "use_v2_model_runner", True):
            build(self, vllm_config=vllm_config, prefix=prefix)

    longcat_flash_ngram.LongcatFlashNgramForCausalLM.__init__ = build_for_runner_2


def replace_parts() -> None:
    import vllm_stand_ins  # noqa: F401

    import_dots()
    leave_attention_out()
    without_kernels()
    build_partly()


def main() -> None:
    replace_parts()
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()  # vLLM starts one for each class: 10 s
    job_path, result_path = sys.argv[1:]
    with open(job_path) as file:
        job = json.load(file)
    answers = []
    for one in job["runs"]:
        answers.append({"name": one["name"]})
        try:
            run(one)
        except Exception as error:
            traceback.print_exc()
            answers[-1]["error"] = f"{type(error).__name__}: {error}"
        print("RUN", one["name"], answers[-1].get("error", "ok"), flush=True)
        with open(result_path, "w") as file:
            json.dump(answers, file)


if __name__ == "__mp_main__":  # a rank's process, which vLLM starts
    replace_parts()
if __name__ == "__main__":
    main()
