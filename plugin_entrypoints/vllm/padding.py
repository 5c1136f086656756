"""vLLM plugin: which rows of a batch are no tokens. Imported only inside vLLM.

For a captured graph vLLM pads a batch up to the graph's size, and routes the padding's leftovers
like tokens. What tells them apart lies in its forward context: the slots in the KV cache, which
only tokens have, in a buffer that stays where it is, so that a graph reads it anew at each replay.
(The context's is_padding does not: the second model runner of 0.26 leaves in it what the last dummy
batch did, that all rows are padding, unless VLLM_MOE_SKIP_PADDING is set.)
"""

from typing import Any

import torch
from vllm.forward_context import get_forward_context


class Padding:
    """Of one layer's batches; config is vLLM's configuration.

    Where vLLM does not tell, or a version tells it another way, padding is computed like tokens.
    """

    def __init__(self, config: Any) -> None:
        # An attribute that is gone tells nothing. With the first, layers see some of the batch's
        # rows; with the others, tokens whose keys another rank, or the host, keeps have no slot.
        self._complete = (
            getattr(config.cache_config, "kv_sharing_fast_prefill", None) is False
            and getattr(config.parallel_config, "decode_context_parallel_size", None) == 1
            and getattr(config, "attention_config", None) is not None
            and getattr(config.attention_config, "hisparse_config", None) is None  # from 0.32
        )
        self._layer: str | None = None  # whose slots are looked at; "": none has any

    def of(self, x: torch.Tensor) -> torch.Tensor | None:
        """The mask, as `HybridLayer.submit` takes it, of the batch x [T, H] of the pass under way;
        None where it is not known, and on the CPU, where vLLM pads nothing."""
        if not x.is_cuda or not self._complete:
            return None
        slots = self._slots(get_forward_context())
        if (
            not isinstance(slots, torch.Tensor) or slots.dtype != torch.int64
            or slots.device != x.device or slots.shape != x.shape[:1] or not slots.is_contiguous()
        ):  # fmt: skip
            return None
        return slots

    def _slots(self, context: Any) -> Any:
        """Each row's slot in the KV cache, -1 for padding. There are none in the profile run, and
        a dummy batch has no slot at all."""
        mappings = getattr(context, "slot_mapping", None)
        if not isinstance(mappings, dict) or not mappings:
            return None
        if self._layer is None:
            layers = getattr(context, "no_compile_layers", {})
            self._layer = next((name for name in mappings if _keeps(layers.get(name))), "")
        return mappings.get(self._layer)


def _keeps(layer: Any) -> bool:
    """Whether each token has a slot for what the layer keeps of it; it has none in Mamba's state,
    and one of no meaning where an encoder's output is attended to."""
    try:
        from vllm.model_executor.layers.attention import Attention, MLAAttention
    except ImportError:
        return False
    if isinstance(layer, Attention):
        return layer.attn_type == "decoder"
    return isinstance(layer, MLAAttention)
