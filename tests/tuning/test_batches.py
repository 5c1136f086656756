"""How engines divide prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_time_model import GPU, E, linear, model, setting

from kt_kernel.tuning.batches import batch_tokens, captured_tokens
from kt_kernel.tuning.rates import HostRates

GIB = 1 << 30


@pytest.mark.parametrize(
    ("gib", "name", "vllm", "sglang"),
    [
        (16, "T4", 2048, 2048),
        (24, "RTX 4090", 2048, 4096),
        (48, "L40", 2048, 4096),
        (80, "NVIDIA A100-SXM4-80GB", 2048, 8192),
        (80, "NVIDIA H100", 8192, 8192),
        (139.8, "NVIDIA H200", 8192, 8192),
        (180, "NVIDIA B200", 16384, 16384),
    ],
)
def test_engines_choose_by_the_gpu(gib: float, name: str, vllm: int, sglang: int) -> None:
    gpu = replace(GPU, name=name, total=int(gib * GIB))
    assert (batch_tokens("vllm", gpu, ()), batch_tokens("sglang", gpu, ())) == (vllm, sglang)


@pytest.mark.parametrize(
    ("engine", "given", "tokens"),
    [
        ("vllm", ["--max-num-batched-tokens", "1024"], 1024),
        ("vllm", ["--max-num-batched-tokens=512", "--max-num-batched-tokens=256"], 256),
        ("vllm", ["--chunked-prefill-size", "1024"], 8192),
        ("vllm", ["--max-num-batched-tokens"], 8192),
        ("vllm", ["--max_num_batched_tokens=1024"], 1024),
        ("vllm", ["--max-num-batched-tokens", "16k"], 16000),
        ("vllm", ["--max-num-batched-tokens", "16K"], 16384),
        ("vllm", ["--max-num-batched-tokens", "1.5k"], 1500),
        ("vllm", ["--max-num-batched-tokens", "k"], 8192),
        ("sglang", ["--chunked-prefill-size", "16K"], 8192),
        ("sglang", ["--chunked-prefill-size", "1024"], 1024),
        ("sglang", ["--chunked-prefill-size", "-1"], 8192),
    ],
)
def test_an_argument_gives_the_number(engine: str, given: list[str], tokens: int) -> None:
    assert batch_tokens(engine, GPU, given) == tokens
    host: Any = HostRates(1e10, 1e11)
    assert batch_tokens("vllm", host, ()) == 2048


def test_every_batch_copies_streamed_experts() -> None:
    """On a slow bus, a prompt of four batches takes four times the copies of one."""
    slow = replace(model(), device=replace(GPU, bus=1e9))
    streamed = setting(0, linear(each=1e-1), streaming=1)
    copies = 5 * E * linear().expert_bytes / 1e9
    one = slow.prefill(streamed, 8192)
    four = replace(slow, batch_tokens=2048).prefill(streamed, 8192)
    assert four - one == pytest.approx(3 * copies, rel=0.05)


@pytest.mark.parametrize(
    ("engine", "streams", "batch", "given", "tokens"),
    [
        ("vllm", 1, 8192, [], 2),
        ("vllm", 7, 8192, [], 8),
        ("vllm", 100, 8192, [], 200),
        ("vllm", 1000, 8192, [], 512),
        ("vllm", 1000, 300, [], 300),
        ("vllm", 16, 8192, ["--enforce-eager"], 0),
        ("vllm", 16, 8192, ["--max-cudagraph-capture-size=300"], 288),
        ("vllm", 16, 8192, ["--max_cudagraph_capture_size", "3"], 2),
        ("sglang", 4, 8192, [], 256),
        ("sglang", 1000, 8192, [], 256),
        ("sglang", 4, 128, [], 128),
        ("sglang", 4, 8192, ["--disable-cuda-graph"], 0),
        ("sglang", 4, 8192, ["--disable-prefill-cuda-graph"], 4),
        ("sglang", 300, 8192, ["--disable-prefill-cuda-graph"], 256),
        ("sglang", 4, 8192, ["--cuda-graph-max-bs-prefill", "1024"], 1024),
        ("sglang", 4, 8192, ["--cuda-graph-max-bs-decode", "512"], 512),
        ("sglang", 4, 8192, ["--cuda-graph-max-bs", "512"], 512),
    ],
)
def test_the_largest_batch_in_cuda_graphs(
    engine: str, streams: int, batch: int, given: list[str], tokens: int
) -> None:
    assert captured_tokens(engine, GPU, streams, batch, given) == tokens
    assert captured_tokens(engine, HostRates(1e10, 1e11), streams, batch, given) == 0


def test_nothing_is_streamed_in_cuda_graphs() -> None:
    at = setting(0, linear(each=6e-5))
    begin = model().streaming_from(at)
    assert begin is not None
    for captured, expected in ((begin - 1, begin), (begin, begin + 1), (8192, None)):
        assert replace(model(), captured=captured).streaming_from(at) == expected
