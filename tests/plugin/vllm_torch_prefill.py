"""Prefill of multi-head latent attention in torch, for a vLLM without the packages that provide it.

Importing it in vLLM's process registers it as vLLM's CUSTOM backend (job of vllm_run.py:
"modules"). Prompts must come in one piece, so that there is no context before them.
"""

from typing import Any

import torch
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import (
    MLAPrefillBackendEnum,
    register_mla_prefill_backend,
)


@register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM)
class TorchPrefill(MLAPrefillBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q, k [T, heads, qk_head_dim], v [T, heads, v_head_dim]. The result has v's shape."""
        assert not return_softmax_lse and out is None and output_scale is None
        result = torch.zeros_like(v)
        starts = self._prefill_metadata.query_start_loc.tolist()
        for begin, end in zip(starts, starts[1:], strict=False):
            given = [one[begin:end].transpose(0, 1) for one in (q, k, v)]
            sums = torch.nn.functional.scaled_dot_product_attention(
                *given, is_causal=True, scale=self.scale
            )
            result[begin:end] = sums.transpose(0, 1)
        return result

    def run_prefill_context_chunk(self, *given: Any, **more: Any) -> Any:
        raise NotImplementedError("a prompt came in pieces")
