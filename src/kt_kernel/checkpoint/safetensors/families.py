"""Where each model family keeps its experts, by model_type of config.json.

Lists only what tests/checkpoint/test_families.py has compared with the family's own modules.
Per-expert names need no entry. Stacked tensors do: nothing in the file shows whether gate or up
comes first, or whether their rows alternate, so stacks without an entry are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...runtime.nested import parts_towards_text

# Prefixes of "layers.": of a causal language model, of a bare model, and of the language parts of
# multimodal models (Qwen3-Omni: thinker; Inkling and MiniCPM-V: llm; DeepSeek-VL2: language; Ling:
# model), of Nemotron-H (backbone), and of DiffusionGemma (decoder, whose weights are the encoder's,
# too). A layer must have exactly one of them; multi-token-prediction layers ("mtp.layers.0") have
# none.
PREFIXES = (
    "model.",
    "",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "thinker.model.",
    "model.llm.",
    "llm.model.",
    "language.model.",
    "model.model.",
    "backbone.",
    "language_model.backbone.",
    "model.decoder.",
)


@dataclass(frozen=True)
class Stacked:
    """All experts in one tensor per matrix. Names follow "layers.{L}.".

    columns=False: gate_up [E, 2I, H], down [E, H, I], as a linear layer stores them.
    columns=True: gate_up [E, H, 2I], down [E, I, H], for x @ W.
    gate and up instead of gate_up: [E, I, H] each; with columns=True, [E, H, I]. Only up: the
    experts have no gate.
    interleaved: gate and up alternate along 2I, gate first. Otherwise all of gate precedes all of
    up. Biases, if named: [E, 2I], arranged like the weights, and [E, H].
    Scales, if named: MXFP4 with blocks uint8 [E, 2I, H/32, 16] and [E, H, I/32, 16], scales
    [E, 2I, H/32] and [E, H, I/32]. stacks.py finds the scales of other formats.
    """

    gate_up: str | None
    down: str
    columns: bool = False
    interleaved: bool = False
    gate: str | None = None
    up: str | None = None
    gate_up_bias: str | None = None
    down_bias: str | None = None
    gate_up_scales: str | None = None
    down_scales: str | None = None

    @property
    def gated(self) -> bool:
        """Whether the experts have a gate."""
        return self.gate_up is not None or self.gate is not None

    def names(self) -> dict[str, str]:
        """The names of the tensors that such a model has, by field."""
        weights = ("gate_up", "gate", "up", "down")
        fields = (*weights, "gate_up_bias", "down_bias", "gate_up_scales", "down_scales")
        return {f: getattr(self, f) for f in fields if getattr(self, f) is not None}


@dataclass(frozen=True)
class Family:
    """block: the module between "layers.{L}." and "experts.{e}." in per-expert names; "" if there
    is none. another: the one of some other checkpoints of the family, if there are such.

    gated: whether experts have a gate. stacked: all stacked arrangements of the family. Two of them
    may share names and differ in orientation; the shapes of gate_up and down tell them apart,
    because H = 2I and H = I cannot both hold.
    """

    block: str
    stacked: tuple[Stacked, ...] = ()
    gated: bool = True
    another: str | None = None

    @property
    def experts(self) -> tuple[str, ...]:
        """The modules that may have the experts, after "layers.{L}."."""
        blocks = (self.block,) if self.another is None else (self.block, self.another)
        return tuple(f"{block}.experts" if block else "experts" for block in blocks)


def _module(block: str, **kwargs: Any) -> Stacked:
    """transformers' own modules, as save_pretrained(save_original_format=False) writes them."""
    return Stacked(f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj", **kwargs)


_MLP = Family("mlp", (_module("mlp"),))
_MIXTRAL = Family("block_sparse_moe", (_module("mlp"),))
# Kimi-K3 without images has "mlp", which SGLang alone reads.
_KIMI_LINEAR = Family("block_sparse_moe", (_module("mlp"),), another="mlp")
_IQUEST = Family("mlp", (Stacked("mlp.experts.fc", "mlp.experts.proj"),))
_DEEPSEEK_V4 = Family("ffn", (_module("mlp"),))
_STEP = Family(
    "moe",
    (
        Stacked(None, "moe.down_proj.weight", gate="moe.gate_proj.weight", up="moe.up_proj.weight"),
        _module("mlp"),
    ),
)
_ARIA = Family(
    "mlp",
    (
        Stacked("mlp.experts.fc1.weight", "mlp.experts.fc2.weight", columns=True),
        _module("mlp", columns=True),
    ),
)
_INKLING = Family(
    "mlp",
    (
        Stacked("mlp.experts.w13_weight", "mlp.experts.w2_weight", interleaved=True),
        _module("mlp"),
    ),
)
_GEMMA4 = Family("", (Stacked("experts.gate_up_proj", "experts.down_proj"),))
_FEED_FORWARD = Family("feed_forward", (_module("feed_forward"),))
_LLAMA4 = Family("feed_forward", (_module("feed_forward", columns=True),))
_NEMOTRON_H = Family(
    "mixer",
    (Stacked(None, "mixer.experts.down_proj", up="mixer.experts.up_proj"),),
    gated=False,
)
_QWEN_VL = Family("mlp", (_module("mlp", columns=True), _module("mlp")))
_GRANITE = Family(
    "block_sparse_moe",
    (
        Stacked("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        _module("block_sparse_moe"),
    ),
)
_GPT_OSS = Family(
    "mlp",
    (
        _module(
            "mlp",
            columns=True,
            interleaved=True,
            gate_up_bias="mlp.experts.gate_up_proj_bias",
            down_bias="mlp.experts.down_proj_bias",
        ),
        Stacked(
            "mlp.experts.gate_up_proj_blocks",
            "mlp.experts.down_proj_blocks",
            interleaved=True,
            gate_up_bias="mlp.experts.gate_up_proj_bias",
            down_bias="mlp.experts.down_proj_bias",
            gate_up_scales="mlp.experts.gate_up_proj_scales",
            down_scales="mlp.experts.down_proj_scales",
        ),
    ),
)

FAMILIES: dict[str, Family] = {
    "afmoe": _MLP,
    "aria": _ARIA,
    "aria_text": _ARIA,
    "axk1": _MLP,
    "axk2": _MLP,
    "cohere2_moe": _MLP,
    "deepseek_ocr2": _MLP,
    "deepseek_v2": _MLP,
    "deepseek_v3": _MLP,
    "deepseek_v32": _MLP,
    "deepseek_v4": _DEEPSEEK_V4,
    "diffusion_gemma": _GEMMA4,
    "dots1": _MLP,
    "ernie4_5_moe": _MLP,
    "exaone_moe": _MLP,
    "flex_olmo": _MLP,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "glm4_moe": _MLP,
    "glm4_moe_lite": _MLP,
    "glm4v_moe": _MLP,
    "glm4v_moe_text": _MLP,
    "glm5_next": _MLP,
    "glm5_next_text": _MLP,
    "glm_moe_dsa": _MLP,
    "gpt_oss": _GPT_OSS,
    "granitemoe": _GRANITE,
    "granitemoe_swa": _GRANITE,
    "granitemoehybrid": _GRANITE,
    "granitemoeshared": _GRANITE,
    "hunyuan_v1_moe": _MLP,
    "hy_v3": _MLP,
    "hy_v4": _MLP,
    "inkling_mm_model": _INKLING,
    "inkling_model": _INKLING,
    "inkling_text": _INKLING,
    "iquest_q1": _IQUEST,
    "jamba": _FEED_FORWARD,
    "kimi_k2": _MLP,
    "kimi_k25": _MLP,
    "kimi_linear": _KIMI_LINEAR,
    "laguna": _MLP,
    "lfm2_moe": _FEED_FORWARD,
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "mellum": _MLP,
    "mimo_v2_flash": _MLP,
    "minimax": _MIXTRAL,
    "minimax_m2": _MIXTRAL,
    "minimax_m3_vl": _MIXTRAL,
    "minimax_m3_vl_text": _MIXTRAL,
    "mistral4": _MLP,
    "mixtral": _MIXTRAL,
    "nemotron_h": _NEMOTRON_H,
    "olmoe": _MLP,
    "phimoe": _MIXTRAL,
    "qwen2_moe": _MLP,
    "qwen3_5_moe": _MLP,
    "qwen3_5_moe_text": _MLP,
    "qwen3_moe": _MLP,
    "qwen3_next": _MLP,
    "qwen3_omni_moe": _MLP,
    "qwen3_vl_moe": _QWEN_VL,
    "qwen3_vl_moe_text": _QWEN_VL,
    "qwen4_exp": _MLP,
    "qwen4_exp_text": _MLP,
    "solar_open": _MLP,
    "step3_text": _STEP,
    "step3p5": _STEP,
    "step3p7": _STEP,
    "zaya": _MLP,
}


def model_type(config: dict[str, Any] | None) -> str | None:
    """model_type of a config.json, or of the text model's inside it if only that one is in the
    table."""
    types = [part.get("model_type") for part in parts_towards_text(config or {})]
    known = [name for name in types if isinstance(name, str) and name in FAMILIES]
    return known[0] if known else types[0] if isinstance(types[0], str) else None
