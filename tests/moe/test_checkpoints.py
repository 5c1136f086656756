"""Layers from checkpoints of every kind that the readers know, against the oracle. That what is
read are the right weights is for tests/checkpoint/test_bad_input.py."""

import sys
from pathlib import Path

import pytest
import torch
from moe_cases import within

from kt_kernel import KTMoEWrapper
from kt_kernel.checkpoint import read_experts
from kt_kernel.runtime.variant import kernel_table
from kt_kernel.testing import moe_reference_with_noise, row_error

sys.path.append(str(Path(__file__).parents[1] / "checkpoint"))
from quantised_files import E, save  # noqa: E402
from samples import H, I, samples  # noqa: E402

K, TOKENS = 2, 40


@pytest.mark.parametrize("name", samples())
def test_forward(tmp_path, name):
    sample = samples()[name]
    path = save(tmp_path, sample.tensors, sample.quantization, sample.model_type)
    # What gpt-oss models have besides biases, with a limit that the values here reach.
    swiglu = {"swiglu_limit": 0.7, "swiglu_alpha": 1.702} if sample.model_type == "gpt_oss" else {}
    layer = KTMoEWrapper(
        0,
        E,
        K,
        H,
        I,
        method=sample.method,
        weight_path=path,
        cpuinfer_threads=2,
        threadpool_count=2,
        **swiglu,
    )
    layer.load_weights(torch.arange(E))

    found = read_experts(path, 0, E, H, I, method=sample.method)
    biases = {f: getattr(found, f) for f in ("gate_bias", "up_bias", "down_bias")}
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, H, generator=generator)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, K, generator=generator)
    matrices = [
        torch.stack(m) if isinstance(m[0], torch.Tensor) else m
        for m in (found.gate, found.up, found.down)
    ]
    y, noise = moe_reference_with_noise(
        hidden,
        ids,
        weights,
        *matrices,
        method=sample.method,
        table=kernel_table(),
        **{f: torch.stack(bias) for f, bias in biases.items() if bias},
        **swiglu,
    )
    for tokens in (1, TOKENS):
        out = layer.forward(hidden[:tokens], ids[:tokens], weights[:tokens])
        assert within(out, y[:tokens], noise[:tokens]), row_error(out, y[:tokens])
