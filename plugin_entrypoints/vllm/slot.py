"""vLLM plugin: uses vLLM's slot for expert layers while a model with kt options is built.

vLLM has one slot for a class that replaces RoutedExperts. The plugin uses it only while such a
model is built, so other models and plugins are not affected.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kt_kernel.serving.option_table import OptionError

_NAME = "RoutedExperts"


def refuse_taken() -> None:
    """Raises OptionError, one line, if another plugin has replaced RoutedExperts."""
    from vllm.model_executor.custom_op import op_registry_oot

    other = op_registry_oot.get(_NAME)
    if other is not None:
        raise OptionError(
            f"another plugin has replaced vLLM's {_NAME} with {other.__module__}."
            f"{other.__qualname__}, which kt-moe must replace, too; choose one with VLLM_PLUGINS, "
            "or remove the kt options"
        )


@contextmanager
def taken() -> Iterator[None]:
    """Inside, vLLM builds our expert layers. OptionError if another plugin has the slot."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from .cold import without_weights_read_here
    from .layer import replacements, select_forward

    refuse_taken()
    original = MoERunner._select_forward
    get_all_weights = DefaultModelLoader.get_all_weights

    @functools.wraps(original)
    def select_forward_with_kt(self: Any) -> Any:
        return select_forward(self)

    ours = replacements()
    for name, replacement in ours.items():
        RoutedExperts.register_oot(replacement, name=name)
    MoERunner._select_forward = select_forward_with_kt
    DefaultModelLoader.get_all_weights = without_weights_read_here(get_all_weights)
    try:
        yield
    finally:
        MoERunner._select_forward = original
        DefaultModelLoader.get_all_weights = get_all_weights
        for name, replacement in ours.items():
            if op_registry_oot.get(name) is replacement:
                del op_registry_oot[name]
