"""Checkpoints that compressed-tensors itself compresses, against its own decompression."""

import pytest
import torch
from quantised_files import PROJECTIONS, E, H, I, make_experts, parts_of, save

from kt_kernel.checkpoint import read_experts
from kt_kernel.testing import values_of

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: E402


@pytest.fixture(autouse=True)
def eager():
    """Compiling what the library marks for it takes far longer than running it once."""
    with torch.compiler.set_stance("force_eager"):
        yield


def scheme(**weights):
    return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))


def compress(name, chosen, weight, **extra):
    """The parts of a random matrix, and what compressed-tensors makes of them again."""
    compressor = BaseCompressor.get_value_from_registry(name)
    return compressor.compress({"weight": weight, **extra}, chosen)


def decompress(name, chosen, parts):
    compressor = BaseCompressor.get_value_from_registry(name)
    return compressor.decompress(dict(parts), chosen)["weight"]


def int4(strategy, symmetric, group=32, order=None):
    grouped = {"group_size": group} if strategy == "group" else {}
    if order:
        grouped["actorder"] = order
    chosen = scheme(num_bits=4, type="int", strategy=strategy, symmetric=symmetric, **grouped)

    def make(rows, columns):
        groups = columns // group if grouped else 1
        extra = {"weight_scale": torch.rand(rows, groups) * 0.1 + 0.05}
        if not symmetric:
            zero = torch.randint(-8, 8, (rows, groups), dtype=torch.int8)
            extra["weight_zero_point"] = zero
        if order == "group":
            extra["weight_g_idx"] = (torch.randperm(columns) // group).int()
        return compress("pack-quantized", chosen, torch.randn(rows, columns), **extra)

    return "RAWINT4", "pack-quantized", chosen, make


def mxfp4():
    chosen = scheme(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True)

    def make(rows, columns):
        scale = 2.0 ** torch.randint(-3, 2, (rows, columns // 32))
        weight = torch.randn(rows, columns)
        return compress("mxfp4-pack-quantized", chosen, weight, weight_scale=scale)

    return "MXFP4", "mxfp4-pack-quantized", chosen, make


def nvfp4():
    chosen = scheme(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True
    )

    def make(rows, columns):
        scale = (torch.rand(rows, columns // 16) + 0.5).to(torch.float8_e4m3fn).float()
        # A power of two, so that dividing by it and multiplying with its inverse are the same.
        extra = {"weight_scale": scale, "weight_global_scale": torch.tensor([4.0])}
        return compress("nvfp4-pack-quantized", chosen, torch.randn(rows, columns), **extra)

    return "NVFP4", "nvfp4-pack-quantized", chosen, make


CASES = {
    "int4 groups": int4("group", True),
    "int4 groups of 64": int4("group", True, 64),
    "int4 zero points": int4("group", False),
    "int4 in order of activations": int4("group", True, order="group"),
    "int4 in order of activations, zero points": int4("group", False, order="group"),
    "int4 in a static order": int4("group", False, order="static"),
    "int4 rows": int4("channel", True),
    "int4 rows, zero points": int4("channel", False),
    "mxfp4": mxfp4(),
    "nvfp4": nvfp4(),
}


@pytest.mark.parametrize("case", CASES)
def test_against_the_library(tmp_path, case):
    method, name, chosen, make = CASES[case]
    tensors = make_experts(make)
    settings = {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": chosen.model_dump(mode="json")},
    }
    found = read_experts(save(tmp_path, tensors, settings), 0, E, H, I, method=method)
    for e in range(E):
        for matrix in PROJECTIONS:
            wanted = decompress(name, chosen, parts_of(tensors, e, matrix))
            values = values_of(getattr(found, matrix)[e])
            assert values.abs().max() > 0.5
            # The library computes in float32.
            assert torch.allclose(values, wanted.double(), rtol=2**-22, atol=0), (e, matrix)
