"""SGLang plugin: models in transformers' code, as with --model-impl transformers, of which only the
experts are layers of SGLang's."""

from collections.abc import Callable
from typing import Any

from .hooks import Hook


def _around_experts(original: Callable[..., None], experts: Any, **given: Any) -> None:
    """Around the construction of a module of experts. SGLang numbers these from 0, without the
    layers that have none. Files of experts and options have the numbers of the model's layers."""
    numbers = [part for part in given["prefix"].split(".") if part.isdecimal()]
    if len(numbers) != 1:
        raise ValueError(
            f"{given['prefix']}: the number of its layer is not known; expected one number among "
            "the parts of the name"
        )
    original(experts, **given | {"layer_id": int(numbers[0])})


HOOKS = (
    Hook("sglang.srt.models.transformers:TransformersFusedMoE.__init__", "AROUND", _around_experts),
)
