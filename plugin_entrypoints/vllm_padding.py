"""vLLM plugin: which rows of a batch are no tokens. Imported only inside vLLM.

For a captured graph vLLM pads a batch up to the graph's size, and routes the padding's leftovers
like tokens. What tells them apart lies in its forward context, in buffers that stay where they are,
so a graph reads them anew at each replay: ``is_padding`` where the model runner keeps it up, else
the slots in the KV cache, which only tokens have.
"""

from typing import Any

import torch
from vllm import envs
from vllm.forward_context import get_forward_context


class Padding:
    """Of one model's layers; config is vLLM's configuration.

    Where vLLM does not tell, or a version tells it another way, padding is computed like tokens.
    """

    def __init__(self, config: Any) -> None:
        # With it layers see some of the batch's rows. An attribute that is gone tells nothing.
        self._all_rows = getattr(config.cache_config, "kv_sharing_fast_prefill", None) is False
        # Else tokens whose keys another rank keeps have no slot here.
        ranks = getattr(config.parallel_config, "decode_context_parallel_size", None)
        self._all_slots = ranks == 1
        # Without it vLLM 0.26's second model runner still gives is_padding, but leaves in it what
        # the last dummy run did: all rows are padding.
        self._marked = bool(getattr(envs, "VLLM_MOE_SKIP_PADDING", False))
        self._layer: str | None = None  # whose slots are looked at; "": none has any

    def of(self, x: torch.Tensor) -> torch.Tensor | None:
        """The mask, as `HybridLayer.submit` takes it, of the batch x [T, H] of the pass under way;
        None where it is not known, and on the CPU, where vLLM pads nothing."""
        if not x.is_cuda or not self._all_rows:
            return None
        context = get_forward_context()
        found, dtype = None, torch.bool
        if self._marked:
            found = getattr(context, "is_padding", None)
        if found is None:
            found, dtype = self._slots(context), torch.int64
        if (
            not isinstance(found, torch.Tensor) or found.dtype != dtype or found.device != x.device
            or found.shape != x.shape[:1] or not found.is_contiguous()
        ):  # fmt: skip
            return None
        return found

    def _slots(self, context: Any) -> Any:
        """Each row's slot in the KV cache, -1 for padding. There are none in the profile run, and
        a dummy batch has no slot at all."""
        mappings = getattr(context, "slot_mapping", None)
        if not self._all_slots or not isinstance(mappings, dict) or not mappings:
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
