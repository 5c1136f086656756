"""vLLM plugin: finds the padding rows of a batch. Imported only inside vLLM.

vLLM pads a batch to the size of a captured graph, and routes the padding like tokens. Its forward
context has the KV cache slot of each row, and only tokens have slots. The buffer stays in place, so
a graph reads it anew at each replay. (The context's is_padding cannot be used: unless
VLLM_MOE_SKIP_PADDING is set, the second model runner of 0.26 leaves the value of the last dummy
batch in it, in which all rows are padding.)
"""

from typing import Any

import torch
from vllm.forward_context import get_forward_context


class Padding:
    """Finds the padding in one layer's batches. config: vLLM's configuration.

    If it is unknown, because a version lacks these attributes or changed them, it is computed like
    tokens.
    """

    def __init__(self, config: Any) -> None:
        # With the first setting, layers see only some rows of a batch. With the others, tokens
        # whose keys are on another rank or on the host have no slot.
        self._complete = (
            getattr(config.cache_config, "kv_sharing_fast_prefill", None) is False
            and getattr(config.parallel_config, "decode_context_parallel_size", None) == 1
            and getattr(config, "attention_config", None) is not None
            and getattr(config.attention_config, "hisparse_config", None) is None  # from 0.32
        )
        self._layer: str | None = None  # the layer whose slots are used; "": no layer has any

    def of(self, x: torch.Tensor) -> torch.Tensor | None:
        """The mask, as `HybridLayer.submit` takes it, for the batch x [T, H] of the current pass.

        None if it is unknown, and on the CPU, where vLLM does not pad.
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
        """The KV cache slot of each row, -1 for padding. A profile run has no slots, and in a dummy
        batch all of them are -1."""
        mappings = getattr(context, "slot_mapping", None)
        if not isinstance(mappings, dict) or not mappings:
            return None
        if self._layer is None:
            layers = getattr(context, "no_compile_layers", {})
            self._layer = next((name for name in mappings if _keeps(layers.get(name))), "")
        return mappings.get(self._layer)


def _keeps(layer: Any) -> bool:
    """Whether the layer has a slot of its own for each token. Mamba's state has none, and the slots
    of an encoder's output do not correspond to the rows of the batch."""
    try:
        from vllm.model_executor.layers.attention import Attention, MLAAttention
    except ImportError:
        return False
    if isinstance(layer, Attention):
        return layer.attn_type == "decoder"
    return isinstance(layer, MLAAttention)
