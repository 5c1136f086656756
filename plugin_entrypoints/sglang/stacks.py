"""SGLang plugin: delivers stacks of experts that a model's own loader leaves out.

SGLang loads a text-only Llama-4 as a dense Llama, skips its experts with a warning, and serves
whatever their memory held. Its multimodal class delivers them. With kt options, both do.
"""

import re
from collections.abc import Iterable, Iterator

import torch

from kt_kernel.serving.cold_loading import WEIGHT_DTYPES

_LEFT_OUT = ("Llama4ForCausalLM",)
# All experts of a layer as published: gate and up [E, H, 2 I], and down [E, I, H].
_STACK = re.compile(r"((?:.+\.)?experts)\.(gate_up_proj|down_proj)")


def with_stacks(
    model: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterable[tuple[str, torch.Tensor]]:
    """What a model's loader gets of a checkpoint. Stacks that it would leave out go to the layers
    one matrix at a time, as those of other models do.

    Raises ValueError, when it comes to it, for a stack whose values are quantised.
    """
    if type(model).__name__ not in _LEFT_OUT:
        return weights
    return _delivered(dict(model.named_parameters()), weights)


def _delivered(
    parameters: dict[str, torch.nn.Parameter], weights: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, stack in weights:
        match = _STACK.fullmatch(name)
        if match is None:
            yield name, stack
            continue
        if stack.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{name}: SGLang does not load quantised experts of this class; accepted: "
                "--kt-hot-format bf16 or packed, or --kt-num-gpu-experts 0"
            )
        shards = ("w2",) if match[2] == "down_proj" else ("w1", "w3")
        parameter = parameters[f"{match[1]}.{'w2' if len(shards) == 1 else 'w13'}_weight"]
        for shard, part in zip(shards, stack.chunk(len(shards), dim=-1), strict=True):
            for expert, matrix in enumerate(part):
                parameter.weight_loader(  # type: ignore[attr-defined]
                    parameter, matrix.T, name, shard_id=shard, expert_id=expert
                )
