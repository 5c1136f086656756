"""vLLM plugin: layers without hot experts, whose weights vLLM neither holds nor reads.

Imported only inside vLLM.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

# The package before its modules, because vLLM's modules have circular imports.
import vllm.model_executor.layers.fused_moe  # noqa: F401
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase


class NoHotExperts(FusedMoEMethodBase):
    """The method of a layer without hot experts: no weights, and no kernel.

    vLLM's own method would select a kernel of the checkpoint's format while the layer is built,
    although it would compute nothing. Such a kernel does not exist on every device.
    """

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """Registers one empty buffer, by which the layer's device is known."""
        layer.register_buffer("kt_device", torch.empty(0), persistent=False)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *args: Any
    ) -> tuple[int, int]:
        """The sizes unchanged, because no kernel needs others."""
        return hidden_size, intermediate_size_per_partition

    def maybe_make_prepare_finalize(self, **given: Any) -> None:
        """vLLM 0.26 calls it under tensor parallelism if loading created no kernel."""


def without_weights_read_here(get_all_weights: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps DefaultModelLoader.get_all_weights: the model does not get the weights of experts that
    kt-moe reads itself."""

    @functools.wraps(get_all_weights)
    def get(loader: Any, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        weights = get_all_weights(loader, model_config, model)
        for module in model.modules():
            if (hybrid := getattr(module, "kt_model", None)) is not None:
                return hybrid.names_read_here.without(weights)
        return weights

    return get
