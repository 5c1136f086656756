"""Stand-ins for steps that SGLang has on GPUs only. Imported first in SGLang's process on the CPU.

With TRITON_INTERPRET=1, Triton's interpreter runs SGLang's portable kernels. Here, the modules that
would choose compiled kernels of AMX CPUs instead, or none at all, take the portable ones; two steps
are written in torch. MoE layers are untouched.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import sglang.srt.utils as utils
import torch
import triton.runtime.autotuner as autotuner
from sglang.kernels.ops.mamba import causal_conv1d_triton
from sglang.srt.arg_groups.model_override_base import MODEL_OVERRIDES
from sglang.srt.configs import update_config
from sglang.srt.layers.attention.mamba import mamba
from sglang.srt.layers.rotary_embedding.rope_variant import FourierRotaryEmbedding
from sglang.srt.models import (  # noqa: F401
    bailing_mm,
    deepseek_vl2,
    interns1pro,
    llama4,
    minimax_m2,
    qwen3_next,
    qwen3_vl_moe,
)

# These modules choose their kernels when they are imported, after all that they import themselves.
is_cpu = utils.is_cpu
utils.is_cpu = lambda: False
from sglang.srt.layers.attention.linear import gdn_backend, kda_backend  # noqa: E402, F401
from sglang.srt.models import grok, qwen3_5  # noqa: E402, F401

utils.is_cpu = is_cpu
# It would time its kernels on a GPU.
autotuner.Autotuner._bench = lambda self, *given, config, **more: [1.0, 1.0, 1.0]
torch.cpu.device = lambda device: nullcontext()  # as a context, which other devices have

# A product with another result type: MLA's gates and mHC.
aten = torch.library.Library("aten", "IMPL")
aten.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")


def squares(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The sums of squares of the rows of q, then of k, float32 [2 T], padded to fours."""
    rows = len(q)
    sums = torch.zeros((2 * rows + 3) // 4 * 4)
    sums[:rows], sums[rows : 2 * rows] = (x.float().square().sum(1) for x in (q, k))
    return sums


def normed(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    sums: torch.Tensor,
    ranks: int = 1,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of the rows of q and k, by what `squares` returned, of all ranks."""

    def one(x: torch.Tensor, weight: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(own / (x.shape[1] * ranks) + eps)
        return (x.float() * scale[:, None] * weight.float()).to(x.dtype)

    rows = len(q)
    return one(q, q_weight, sums[:rows]), one(k, k_weight, sums[rows : 2 * rows])


grok.get_stream = lambda name: object()  # of a GPU
minimax_m2.rms_sumsq_serial, minimax_m2.rms_apply_serial = squares, normed
# Elsewhere it expects rotary embeddings in place, and those for the CPU are not.
llama4._is_npu = True
for name in ("causal_conv1d_fn", "causal_conv1d_update"):
    for ending in ("", "_triton"):
        setattr(mamba, name + ending, getattr(causal_conv1d_triton, name))
# They would be computed in bfloat16 only, in which Triton's interpreter computes MLA wrongly.
for name in ("MistralLarge3ForCausalLM", "PixtralForConditionalGeneration"):
    del MODEL_OVERRIDES[name]
# An encoder of images from a package that is not installed, of 400 million parameters.
deepseek_vl2.DeepseekVL2ForCausalLM._init_vision_module = lambda *given: torch.nn.Identity()


def build(self: torch.nn.Module, *given: object, start_layer: int, **more: object) -> None:
    build_layer(self, *given, **more)


# Its layers take no start_layer, which the class that builds them passes.
build_layer = interns1pro.InternS1ProTextDecoderLayer.__init__
interns1pro.InternS1ProTextDecoderLayer.__init__ = build
FourierRotaryEmbedding.__init__.__kwdefaults__["device"] = "cpu"


def loads(self: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
    return load_text(self, weights) or set()


# The class around this one needs the names of what it has loaded, which it does not return.
load_text = bailing_mm.BailingMoeV2ForCausalLM.load_weights
bailing_mm.BailingMoeV2ForCausalLM.load_weights = loads


def update_size(config: object, name: str, *given: object) -> object:
    about = getattr(config, "hf_config", config)  # a part has only its own
    has_list = isinstance(getattr(about, name, None), list)
    return config if has_list else update_one_size(config, name, *given)


# It expects one size of experts, of which Ernie 4.5 VL has two.
update_one_size = update_config.update_intermediate_size
update_config.update_intermediate_size = update_size
