"""The model classes whose experts an engine loads in its own way, so that kt-moe reads all of them.

The lists are not in the plugins, because `kt tune` needs them without an engine.
"""

from __future__ import annotations

from collections.abc import Iterable

_CLASSES = {
    # Their loaders write experts to vLLM's tensors by themselves, and not by the callback that cold
    # experts take.
    "vllm": frozenset(
        ("GptOssForCausalLM", "InklingForCausalLM", "InklingForConditionalGeneration")
    ),
    # Their loaders deliver the experts of 16-bit checkpoints in stacks.
    "sglang": frozenset(("GptOssForCausalLM", "InklingForConditionalGeneration")),
}


def loads_in_its_own_way(engine: str, classes: Iterable[str]) -> bool:
    """Whether an engine, vllm or sglang, does so with a model of these classes."""
    return not _CLASSES[engine].isdisjoint(classes)
