"""vLLM plugin: finds the rows of a batch that are padding. Imported only inside vLLM.

vLLM pads a batch to the size of a captured graph, and routes the leftovers in the padding like
tokens. Its forward context has each row's slot in the KV cache, which only tokens have, in a buffer
that stays in place, so that a graph reads it anew at each replay. (The context's is_padding cannot
be used: the second model runner of 0.26 leaves in it what the last dummy batch did, that all rows
are padding, unless VLLM_MOE_SKIP_PADDING is set.)
"""

from typing import Any

import torch
from vllm.forward_context import get_forward_context


class Padding:
    """Finds the padding in one layer's batches. config: vLLM's configuration.

    Where it is not known, it is computed like tokens: without these attributes, or in a version
    that keeps them in another form.
    """

    def __init__(self, config: Any) -> None:
        # With the first setting, layers see some of a batch's rows only. With the others, tokens
        # whose keys are on another rank, or on the host, have no slot.
        self._complete = (
            getattr(config.cache_config, "kv_sharing_fast_prefill", None) is False
            and getattr(config.parallel_config, "decode_context_parallel_size", None) == 1
            and getattr(config, "attention_config", None) is not None
            and getattr(config.attention_config, "hisparse_config", None) is None  # from 0.32
        )
        self._layer: str | None = None  # whose slots are looked at; "": no layer has any

    def of(self, x: torch.Tensor) -> torch.Tensor | None:
        """The mask, as `HybridLayer.submit` takes it, for the batch x [T, H] of the current pass.

        None where it is not known, and on the CPU, where vLLM pads nothing.
        """
        if not x.is_cuda or not self._complete:
            return None
        slots = self._slots(get_forward_context())
        fits = (
            isinstance(slots, torch.Tensor)
            and slots.dtype == torch.int64
            and slots.device == x.device
            and slots.shape == x.shape[:1]
            and slots.is_contiguous()
        )
        return slots if fits else None

    def _slots(self, context: Any) -> Any:
        """Each row's slot in the KV cache, -1 for padding. A profile run has none, and a dummy
        batch has no slot at all."""
        mappings = getattr(context, "slot_mapping", None)
        if not isinstance(mappings, dict) or not mappings:
            return None
        if self._layer is None:
            layers = getattr(context, "no_compile_layers", {})
            self._layer = next((name for name in mappings if _keeps(layers.get(name))), "")
        return mappings.get(self._layer)


def _keeps(layer: Any) -> bool:
    """Whether the layer keeps something of each token in a slot of its own. Mamba's state has none,
    and an encoder's output has slots that say nothing about the batch's rows."""
    try:
        from vllm.model_executor.layers.attention import Attention, MLAAttention
    except ImportError:
        return False
    if isinstance(layer, Attention):
        return layer.attn_type == "decoder"
    return isinstance(layer, MLAAttention)
