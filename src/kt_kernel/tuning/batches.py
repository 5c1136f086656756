"""How many tokens of a prompt an engine computes at a time. A longer prompt is divided, and every
part copies streamed experts again.

Engines choose the number by the GPU, unless an argument gives it: as vLLM 0.32.0 does for servers
(engine/arg_utils.py), and SGLang 0.5.23 (arg_groups/memory_hook.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from .arguments import BATCH_FLAG, value_of, whole_number
from .rates import BATCH, GpuRates, HostRates

_GIB = 1 << 30
# Bytes of a GPU's memory below which a batch has so many tokens.
_BY_MEMORY = {
    "vllm": ((70 * _GIB, 2048), (160 * _GIB, BATCH)),
    "sglang": ((20 * _GIB, 2048), (60 * _GIB, 4096), (160 * _GIB, BATCH)),
}
_LARGEST = 16384
_ON_CPU = {"vllm": 2048, "sglang": 4096}


def batch_tokens(engine: str, device: GpuRates | HostRates, arguments: Sequence[str]) -> int:
    """Tokens of an engine's largest batch.

    arguments: of the engine. One that is no number counts as not given: the engine refuses it, or,
    as SGLang with -1, does not divide prompts, which are then as long as the usual batches here.
    """
    if given := whole_number(engine, value_of(arguments, BATCH_FLAG[engine])):
        return given
    if isinstance(device, HostRates):
        return _ON_CPU[engine]
    if engine == "vllm" and "a100" in device.name.lower():
        return 2048
    limits = _BY_MEMORY[engine]
    return next((tokens for size, tokens in limits if device.total < size), _LARGEST)
