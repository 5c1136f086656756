"""What vLLM's kernels for packed hot experts are called with, by vLLM's own functions; see
vllm_hooks.py."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

# First, because vLLM's modules import each other in a circle.
import vllm.model_executor.layers.fused_moe  # noqa: F401

# isort: split
from vllm.model_executor.layers.fused_moe import fused_moe

from kt_kernel.plugin_entrypoints.vllm.hot import accepted_blocks
from kt_kernel.serving.hot_weights import HotShape

GROUPS_IN_A_BLOCK = (1, 2, 4, 8)  # what the CUDA kernel accepts


def blocks(tokens: int, top_k: int, hidden: int, inter: int, slots: int, group: int) -> list[int]:
    """Columns in a block of both products, as vLLM chooses them; 0: without the CUDA kernel."""
    routes = tokens * top_k
    if not fused_moe.should_moe_wna16_use_cuda(routes, group, slots, 4):
        return [0, 0]
    shapes = (slots, 2 * inter, hidden // 2), (slots, hidden, inter // 2)
    config = fused_moe.try_get_optimal_moe_config(
        *shapes, top_k, "int4_w4a16", tokens, block_shape=[0, group]
    )
    found = []
    for rows, columns, each in ((2 * inter, hidden, top_k), (hidden, inter, 1)):
        given: dict[str, Any] = dict(
            use_moe_wna16_cuda=True,
            num_valid_tokens=routes,
            size_k=columns,
            size_n=rows,
            num_experts=rows,
            group_size=group,
            real_top_k=each,
            block_size_m=config["BLOCK_SIZE_M"],
        )
        chosen = config | fused_moe.get_moe_wna16_block_config(config=config, **given)
        assert columns % chosen["BLOCK_SIZE_K"] == 0
        found.append(chosen["BLOCK_SIZE_K"])
    return found


def check_blocks_of_packed_experts() -> None:
    """The kernel refuses what vLLM chooses for a token of Qwen3-30B-A3B in groups of 32."""
    refused = 0
    sizes = ((2048, 768), (7168, 2048), (2880, 2880), (4096, 1536), (512, 256), (1024, 96))
    with patch.object(type(fused_moe.current_platform), "is_cuda", return_value=True):
        for hidden, inter in sizes:
            for tokens, top_k in ((1, 8), (2, 8), (1, 4), (4, 4), (16, 1), (3, 8), (64, 8)):
                for group in (32, 64, 128):
                    if hidden % group or inter % group:
                        continue
                    given = tokens, top_k, hidden, inter, 113, group
                    theirs = blocks(*given)
                    refused += any(n // group not in (*GROUPS_IN_A_BLOCK, 0) for n in theirs)
                    hot: Any = SimpleNamespace(
                        group=group, bits=4, shape=HotShape(113, hidden, inter)
                    )
                    with accepted_blocks(hot, tokens, top_k):
                        ours = blocks(*given)
                    assert all(n // group in (*GROUPS_IN_A_BLOCK, 0) for n in ours), (given, ours)
                    assert (ours == theirs) or group == 32
    assert refused  # otherwise accepted_blocks is no longer needed
