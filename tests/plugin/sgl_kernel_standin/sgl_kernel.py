"""The one function of SGLang's compiled kernels that its CPU path calls in these tests.

PyPI has no CPU build of `sgl_kernel`. With this folder on PYTHONPATH, an unmodified SGLang runs a
plain decoder-only model on the CPU. This is only for tests: nothing here is installed.

SGLang imports more CPU functions than it calls here (moving the key-value cache, speculative
decoding). Those names exist, too, and raise when called.
"""

from collections.abc import Callable

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Writes consecutive pieces of `out_cache_loc` [N] into rows of `req_to_token` [R, pool_len].

    Request i of `req_pool_indices` [B] gets the next end_offset[i] - start_offset[i] locations, in
    columns start_offset[i] to end_offset[i] - 1 of its row. All tensors hold integers.
    """
    taken = 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in spans:
        piece = out_cache_loc[taken : taken + end - start]
        req_to_token[row, start:end] = piece.to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable:
    if not name.endswith("_cpu"):
        raise AttributeError(f"the stand-in for sgl_kernel has no {name}")

    def absent(*args, **kwargs):
        raise NotImplementedError(f"the stand-in for sgl_kernel has no working {name}")

    return absent
