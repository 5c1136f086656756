"""Measures what a GPU does beside the CPU. Needs torch with CUDA, and no engine."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ..runtime.gpu import gpu_memory
from ..runtime.text import shown_size
from .rates import GpuRates
from .shape import Shape

_TOKENS = (1, 4, 16, 64)
_LAYERS = 8  # whose weights do not fit into the GPU's cache
_ROUNDS = 5
_CHAIN = 200  # small kernels
_PRODUCT = 4096, 4096, 8192


def measure_gpu(shape: Shape, device: torch.device) -> GpuRates:
    """The rates of a GPU for a model's layers; takes some seconds and about 2 GB on it.

    Raises:
        ValueError: it has not so much memory free.
    """
    try:
        return _measured(shape, device)
    except torch.OutOfMemoryError as error:
        memory = gpu_memory(device)
        raise ValueError(
            f"the GPU has {shown_size(memory.free, down=True)} of {shown_size(memory.total)} free, "
            "too little to measure it; end what else uses it"
        ) from error


def _measured(shape: Shape, device: torch.device) -> GpuRates:
    bandwidth, bus = _copies(shape, device)
    m, k, n = _PRODUCT
    left = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    right = torch.randn(k, n, device=device, dtype=torch.bfloat16)
    product = _best(lambda: left @ right)
    small = torch.zeros(16, shape.hidden, device=device, dtype=torch.bfloat16)

    def chain() -> None:
        for _ in range(_CHAIN):
            small.add_(1)

    return GpuRates(
        name=torch.cuda.get_device_name(device),
        total=gpu_memory(device).total,
        rest=tuple((n, _rest(shape, n, device)) for n in _TOKENS),
        kernel=_best(_captured(chain)) / _CHAIN,
        bandwidth=bandwidth,
        flops=2 * m * k * n / product,
        bus=bus,
        head=tuple((n, _head(shape, n, device)) for n in _TOKENS),
    )


def _copies(shape: Shape, device: torch.device) -> tuple[float, float]:
    """Bytes per second of the GPU's memory, read and written, and of copies from pinned memory that
    are as large as an expert in 4 bits."""
    size, part = 1 << 29, 1 << 28
    one = torch.empty(size, dtype=torch.uint8, device=device)
    other = torch.empty_like(one)
    host = torch.empty(part, dtype=torch.uint8, pin_memory=True)
    pieces = host.split(max(shape.expert_weights * 9 // 16, 1 << 16))
    places = one[:part].split(len(pieces[0]))

    def over_bus() -> None:
        for place, piece in zip(places, pieces, strict=True):
            place.copy_(piece, non_blocking=True)

    return 2 * size / _best(lambda: one.copy_(other)), part / _best(over_bus)


def _rest(shape: Shape, tokens: int, device: torch.device) -> float:
    """Seconds of a layer without its experts: projections with as many weights as the model's
    layers have besides, attention to one token, norms and the router. In a CUDA graph."""
    weights = shape.layer_bytes // shape.value_bytes // shape.layers
    columns = max(weights // (2 * shape.hidden) // 64 * 64, 64)
    kind = torch.bfloat16
    inside = [torch.randn(columns, shape.hidden, device=device, dtype=kind) for _ in range(_LAYERS)]
    outside = [
        torch.randn(shape.hidden, columns, device=device, dtype=kind) for _ in range(_LAYERS)
    ]
    routers = torch.randn(shape.experts, shape.hidden, device=device, dtype=kind)
    scale = torch.ones(shape.hidden, device=device, dtype=kind)
    across = torch.ones(columns, device=device, dtype=kind)
    x = torch.randn(tokens, shape.hidden, device=device, dtype=kind)
    norm, linear = torch.nn.functional.rms_norm, torch.nn.functional.linear

    def layers() -> None:
        y = x
        for first, second in zip(inside, outside, strict=True):
            heads = linear(norm(y, scale.shape, scale), first)
            # Norms of queries and keys, rotary embeddings, the cache, attention in two parts.
            for _ in range(6):
                heads = norm(heads, across.shape, across)
            y = y + linear(heads, second)
            chances = torch.softmax(linear(norm(y, scale.shape, scale), routers), -1)
            torch.topk(chances, shape.top_k, -1)

    return _best(_captured(layers)) / _LAYERS


def _head(shape: Shape, tokens: int, device: torch.device) -> float:
    """Seconds of what follows the layers: the output matrix, and a sampled token of each request.
    In a CUDA graph."""
    kind = torch.bfloat16
    vocabulary = max(shape.head_bytes // shape.value_bytes // shape.hidden, 64)
    matrix = torch.randn(vocabulary, shape.hidden, device=device, dtype=kind)
    x = torch.randn(tokens, shape.hidden, device=device, dtype=kind)
    random = torch.ones(tokens, vocabulary, device=device)

    def sample() -> None:
        logits = torch.nn.functional.linear(x, matrix).float()
        chances = torch.softmax(logits / 1.1, -1)
        torch.argmax(chances / random, -1)

    return _best(_captured(sample))


def _captured(call: Callable[[], None]) -> Callable[[], None]:
    """A replay of the call's kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _best(call: Callable[[], object]) -> float:
    """The shortest of some times, in seconds."""
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times)
