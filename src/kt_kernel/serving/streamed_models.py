"""What a server streams, as far as is known before the model is loaded."""

from __future__ import annotations

from typing import Any

from ..checkpoint import Checkpoint
from ..runtime.variant import kernel_kind
from ..weights.methods import get_method
from .model_config import may_be_streamed
from .options import KTOptions


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
