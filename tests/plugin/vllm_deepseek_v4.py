"""Makes vLLM's CPU code for DeepSeek-V4 run without Triton. Imported first in vLLM's process.

vLLM 0.32 has this model's layers for the CPU in C++, but describes a batch to them by kernels of
Triton, which has no build for the CPU. They are written in torch here, except for those whose
results only GPUs read. vLLM builds the class with images on GPUs only, of modules that are not.

Its kernels for the CPU leave out the limit of SwiGLU, so that kt-moe refuses hot experts there. The
values of these tests stay below the limit, and the refusal is taken out.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from vllm.models import deepseek_v4
from vllm.models.deepseek_v4.common import vl_model
from vllm.models.deepseek_v4.cpu import cpu_mla
from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa
from vllm.v1.attention.ops import metadata

from kt_kernel.plugin_entrypoints.vllm import layer


def token_to_req_indices(
    query_start_loc: torch.Tensor, out: torch.Tensor, num_mapped_tokens: int, num_tokens: int
) -> torch.Tensor:
    """The request of each of the first num_tokens tokens, in ``out``; 0 from num_mapped_tokens on.

    query_start_loc [R + 1]: the first token of each request.
    """
    tokens = torch.arange(num_tokens)
    requests = torch.searchsorted(query_start_loc[1:].contiguous(), tokens, right=True)
    requests.clamp_(max=len(query_start_loc) - 2)
    out[:num_tokens] = requests.masked_fill(tokens >= num_mapped_tokens, 0)
    return out[:num_tokens]


def compressed_slots(
    out: torch.Tensor,
    slots: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    compress_ratio: int,
    *ranks: int,
) -> None:
    """Where each token that completes a group of compress_ratio tokens stores the group's state; -1
    for the other tokens, and for those without a slot of their own.

    block_table [R, B]: the blocks of each request, of block_size states each.
    """
    assert ranks == (1, 1), "one rank"
    for request, end in enumerate(query_start_loc[1:].tolist()):
        start = int(query_start_loc[request])
        positions = torch.arange(int(seq_lens[request]) - (end - start), int(seq_lens[request]))
        states = positions // compress_ratio
        blocks = block_table[request, states // block_size].long()
        last = (positions + 1) % compress_ratio == 0
        own = blocks * block_size + states % block_size
        out[start:end] = torch.where(last & (slots[start:end] >= 0), own, -1)


def prefill_spans(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    state_starts: torch.Tensor,
    row_starts: torch.Tensor,
    state_to_request: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    first: int,
    stop: int,
    *ranks: int,
    num_reqs: int,
    COMPRESS_RATIO: int,
) -> None:
    """The compressed states that each token sees, from starts [T] to ends [T], and the request of
    each state."""
    assert (first, ranks) == (0, (0, 1, 1)) and stop == len(starts), "a whole batch on one rank"
    for request in range(num_reqs):
        start, end = query_start_loc[request : request + 2].tolist()
        seen = torch.arange(int(seq_lens[request]) - (end - start), int(seq_lens[request])) + 1
        starts[start:end] = row_starts[request]
        ends[start:end] = row_starts[request] + seen // COMPRESS_RATIO
        state_to_request[state_starts[request] : state_starts[request + 1]] = request


def nothing(*given: Any, **more: Any) -> None:
    """For a kernel whose results the CPU does not read, and for the refusal."""


def no_schedules(self: Any, num_decode_tokens: int) -> defaultdict[str, None]:
    """Of tiles, by the kind of layer. The CPU has none, and vLLM 0.32 forgets two kinds there."""
    return defaultdict(lambda: None)


metadata.compute_token_to_req_indices = token_to_req_indices
sparse_swa.compute_token_to_req_indices = token_to_req_indices
sparse_swa._COMPUTE_PREFILL_METADATA_KERNEL = nothing
sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL = nothing
compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL = compressed_slots
indexer._BUILD_PREFILL_CHUNK_METADATA_KERNEL = prefill_spans
cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = no_schedules
layer._refuse_on_cpu = nothing
deepseek_v4.DeepseekV4ForConditionalGeneration = vl_model.DeepseekV4ForConditionalGeneration
