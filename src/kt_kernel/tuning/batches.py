"""How many tokens of a prompt an engine computes at a time, and up to which number it captures
batches in CUDA graphs. A longer prompt is divided, and every part copies streamed experts again;
in a CUDA graph, nothing is streamed.

Engines choose the numbers by the GPU and by the number of requests, unless arguments give them: as
vLLM 0.32.0 does for servers (engine/arg_utils.py, config/vllm.py), and SGLang 0.5.23
(arg_groups/memory_hook.py). A plugin reads what its engine has chosen; here, no engine runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..serving.streamed_models import LARGEST_CAPTURED
from .arguments import BATCH_FLAG, name_of, value_of, whole_number
from .rates import BATCH, GpuRates, HostRates

_GIB = 1 << 30
# Bytes of a GPU's memory below which a batch has so many tokens.
_BY_MEMORY = {
    "vllm": ((70 * _GIB, 2048), (160 * _GIB, BATCH)),
    "sglang": ((20 * _GIB, 2048), (60 * _GIB, 4096), (160 * _GIB, BATCH)),
}
_LARGEST = 16384
_ON_CPU = {"vllm": 2048, "sglang": 4096}
# Tokens of vLLM's largest CUDA graph, on GPUs other than the largest Blackwell ones.
_VLLM_GRAPH = 512
# Requests of SGLang's largest CUDA graph for decoding: below so many bytes, and above.
_SGLANG_GRAPH = ((20 * _GIB, 8), (35 * _GIB, 48), (60 * _GIB, 32), (160 * _GIB, 256))
_SGLANG_LARGEST_GRAPH = 512


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


def captured_tokens(
    engine: str, device: GpuRates | HostRates, streams: int, batch: int, arguments: Sequence[str]
) -> int:
    """Tokens of the largest batch that an engine captures in CUDA graphs if experts may be
    streamed; 0 if it captures none.

    streams: requests at a time. batch: as `batch_tokens` returns it. arguments: of the engine;
    those that `arguments.GRAPH_FLAGS` names count.
    """
    if isinstance(device, HostRates):
        return 0
    given = {name_of(word) for word in arguments}
    if engine == "vllm":
        return _captured_by_vllm(streams, batch, given, arguments)
    if "--disable-cuda-graph" in given:
        return 0
    most = next((n for size, n in _SGLANG_GRAPH if device.total < size), _SGLANG_LARGEST_GRAPH)
    number = whole_number(engine, value_of(arguments, "--cuda-graph-max-bs-decode"))
    decoding = min(most, streams) if number is None else number
    if "--disable-prefill-cuda-graph" in given:
        return decoding
    prompts = whole_number(engine, value_of(arguments, "--cuda-graph-max-bs-prefill"))
    # Unless prompts are chosen, the plugin leaves those up to this length, or up to decoding's.
    return max(decoding, min(LARGEST_CAPTURED if prompts is None else prompts, batch))


def _captured_by_vllm(streams: int, batch: int, given: set[str], arguments: Sequence[str]) -> int:
    if "--enforce-eager" in given:
        return 0
    number = whole_number("vllm", value_of(arguments, "--max-cudagraph-capture-size"))
    limit = min(2 * streams, _VLLM_GRAPH) if number is None else number
    if limit >= batch:
        return batch
    if limit < 8:
        return next((size for size in (4, 2, 1) if size <= limit), 0)
    return limit - limit % (16 if limit >= 256 else 8)
