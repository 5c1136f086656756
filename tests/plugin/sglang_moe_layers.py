"""Runs in the SGLang environment: loads models, and computes only their MoE layers.

    sglang_moe_layers.py JOB.json RESULT.json

JOB: {"runs": [{"name", "model", "kt", "engine": arguments of SGLang, "inputs": file, "outputs":
      file to write}]}; the files have safetensors, see test_moe_layers.py.
RESULT: [{"name"}, or {"name", "error"} for a run that raised].

A run's scheduler ends once its model has computed.
"""

import json
import multiprocessing
import os
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import moe_layers_run
import sglang_run
import torch

# What model files name when they are imported, and MoE layers do not call.
ABSENT = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_qkvzba_split_reshape_cat_cpu",
)


def define_operators() -> tuple[torch.library.Library, ...]:
    """Operators that SGLang uses on the CPU and that are missing there. They last as long as what
    is returned."""
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
    kernels = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name in ABSENT:
        kernels.define(f"{name}() -> ()")
    return aten, kernels


def open_flash_attention() -> None:
    """Makes a package importable without the library for GPUs that it imports first: Inkling takes
    one function from it."""
    from sglang.kernels.ops.attention import flash_attn

    (folder,) = flash_attn.__path__
    package = ModuleType(f"{flash_attn.__name__}.cute")
    package.__path__ = [f"{folder}/cute"]
    sys.modules[package.__name__] = package


class Nothing(torch.nn.Module):
    """In place of parts that are not called."""

    def __init__(self, *given: object, **more: object) -> None:
        super().__init__()

    def load_converted_state(self, state: object) -> None:
        pass


def clamped_swiglu(gate_up: torch.Tensor, out: torch.Tensor, limit: float) -> None:
    gate, up = gate_up.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit))


def gemma_router(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Gemma 4's router [T, E]. SGLang's norm leaves out the router's scales on the CPU."""
    return self.proj(self.norm(x) * self.scale * self.root_size)[0]


def call(block: torch.nn.Module, x: torch.Tensor, **given: object) -> object:
    # Intern-S2-Mobius' banks of experts are called by name.
    return getattr(block, "forward_routed", block)(x, **given)


def hook(one: dict) -> None:
    """Makes a model runner, once it has loaded its model, compute the MoE layers and end the
    process."""
    from sglang.kernels.ops.activation import silu_and_mul_clamp
    from sglang.srt.arg_groups import mamba_hook
    from sglang.srt.arg_groups.model_override_base import _MODEL_OVERRIDE_FNS
    from sglang.srt.arg_groups.model_overrides import iquest_q1  # noqa: F401 - registers
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models import deepseek_v4, gemma4_causal
    from sglang.srt.models.dots3_common import dots_omni_towers
    from sglang.srt.models.dots3_common import modeling as dots3

    initialize = ModelRunner.initialize

    def compute(self: ModelRunner) -> None:
        with torch.inference_mode():
            moe_layers_run.compute_all(self.model, "moe_runner_config", call, one)
        sys.stdout.flush()
        os._exit(0)

    def tell(self: ModelRunner) -> None:
        try:
            initialize(self)
        except Exception as error:
            _error(one).write_text(f"{type(error).__name__}: {error}")
            raise

    # Inkling demands copies of states, which are not made here.
    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True
    # Dots3Note without attention and encoders, whose weights would be needed.
    dots3._require_cuda = lambda: None
    for module, name in (
        (dots3, "get_rope_wrapper"),
        (dots_omni_towers, "DotsNoteOmniAudioEncoder"),
        (dots_omni_towers, "DotsNoteOmniVisionEncoder"),
    ):
        setattr(module, name, Nothing)
    # It marks its result as memory that GPUs share.
    dots3.use_symmetric_memory = lambda group: nullcontext(SimpleNamespace(tag=id))
    gemma4_causal.Gemma4Router.forward = gemma_router
    # It would demand an attention for GPUs.
    del _MODEL_OVERRIDE_FNS["IQuestQ1ForCausalLM"]
    # DeepSeek-V3.2 asks which attention the GPU has.
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    # Inkling's shared experts, in Triton's interpreter, ask how many multiprocessors it has.
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=1)
    torch.cuda.Stream = lambda *given, **more: None  # Kimi-K3 makes some
    # DeepSeek-V4 compiles kernels for GPUs, one of them for its shared expert.
    deepseek_v4.DeepseekV4ForCausalLM._prewarm_mhc_kernels = lambda self: None
    kernel = SimpleNamespace(run=clamped_swiglu)
    silu_and_mul_clamp._jit_silu_and_mul_clamp_module = lambda dtype: kernel
    ModelRunner.maybe_init_dwdp = compute  # the first step after the model is complete
    ModelRunner.initialize = tell


def _error(one: dict) -> Path:
    return Path(one["outputs"] + ".error")


def run(one: dict) -> None:
    import sglang

    hook(one)
    os.environ.pop("KT_CONFIG", None)
    if one["kt"] is not None:
        os.environ["KT_CONFIG"] = json.dumps(one["kt"])
    arguments = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "grammar_backend": "none",
        "max_total_tokens": 1024,
        "mem_fraction_static": 0.6,
        "random_seed": 0,
        "log_level": "info",
        **sglang_run.CPU,
    }
    try:
        sglang.Engine(model_path=one["model"], **arguments | one["engine"])
    except BaseException as error:
        # The scheduler's end is an error to the engine. Its own came first.
        if not _error(one).exists():
            _error(one).write_text(f"{type(error).__name__}: {error}")
        traceback.print_exc()
    finally:
        os._exit(0)


def main() -> None:
    job_path, result_path = sys.argv[1:]
    with open(job_path) as file:
        job = json.load(file)
    operators = define_operators()
    open_flash_attention()
    sglang_run.import_all()
    answers = []
    assert operators
    for one in job["runs"]:
        process = multiprocessing.Process(target=run, args=(one,))
        process.start()
        process.join()
        answers.append({"name": one["name"]})
        if not os.path.exists(one["outputs"]):
            error = _error(one)
            answers[-1]["error"] = error.read_text() if error.exists() else "no outputs"
        print("RUN", one["name"], answers[-1].get("error", "ok"), flush=True)
        with open(result_path, "w") as file:
            json.dump(answers, file)


if __name__ == "__main__":
    main()
