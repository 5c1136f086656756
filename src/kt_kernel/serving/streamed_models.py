"""What a server streams, as far as is known before the model is loaded."""

from __future__ import annotations

from typing import Any

from ..checkpoint import Checkpoint
from ..runtime.variant import kernel_kind
from ..weights.methods import get_method
from .model_config import may_be_streamed
from .options import KTOptions

#: Tokens of the largest prompt that SGLang captures in a CUDA graph if the threshold is measured,
#: which happens after SGLang has read its arguments. Longer prompts gain little from CUDA graphs,
#: as the CPU takes longer than the host's launches, and much from streaming: with 8 layers of
#: Qwen3-30B-A3B's shape in INT4_G32, 512 tokens took 85 ms in a graph, 96 ms without, and 52 ms
#: streamed (one H200, SGLang 0.5.17).
LARGEST_CAPTURED = 256


def may_stream(options: KTOptions, config: Any, checkpoint: Checkpoint | None) -> bool:
    """Whether a server on a GPU may stream the cold experts of long batches. False is certain; the
    start of streaming checks the rest (`streaming_start`).

    Args:
        options: with the method.
        config: the language model's configuration.
        checkpoint: the files of the experts, if kt-moe reads them.
    """
    threshold = options.given_threshold
    # With a kind of kernel, results must not depend on the batch, unless the user wants it.
    if threshold == 0 or (threshold is None and kernel_kind()):
        return False
    if not may_be_streamed(config):
        return False
    kept = get_method(options.method).quantised
    return checkpoint is None or not (kept and checkpoint.in_activation_order)
