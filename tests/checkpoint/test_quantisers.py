"""Experts whose codes and scales follow the arithmetic of the libraries that write the formats.

AutoRound's symmetric integers (auto_round/data_type/int.py, int_sym): the value of the largest
magnitude in a group, divided by -2^(bits - 1) if it is positive and by 2^(bits - 1) otherwise, is
the scale. So about half of all scales are negative.
"""

import pytest
import test_awq
import torch
from quantised_files import H, I, check_layer, check_values, make_experts, save
from test_int4 import pack_int32

from kt_kernel.testing import values_of

GROUP = 32
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True}


def int_sym(weights, bits=4, group=GROUP, dtype=torch.float16):
    """Codes [N, K] from 0, scales [N, K/g], and the values that they stand for."""
    groups = weights.unflatten(1, (-1, group))
    low, high = -groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    half = 2 ** (bits - 1)
    scale = (torch.where(high < low, low, -high) / half).to(dtype)
    codes = (groups / scale.float()[..., None]).round() + half
    codes = codes.clamp(0, 2 * half - 1)
    values = (codes - half).double() * scale.double()[..., None]
    return codes.flatten(1).long(), scale, values.flatten(1)


def auto_gptq(codes, scale):
    zeros = torch.full(scale.T.shape, 7)  # 8, less one
    return {"qweight": pack_int32(codes.T, 0), "qzeros": pack_int32(zeros, 1), "scales": scale.T}


def auto_awq(codes, scale):
    zeros = torch.full(scale.T.shape, 8)
    return {
        "qweight": test_awq.pack(codes.T),
        "qzeros": test_awq.pack(zeros),
        "scales": scale.T.contiguous(),
    }


def llm_compressor(codes, scale):
    return {"weight_packed": pack_int32(codes, 1), "weight_scale": scale}


COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": GROUP}}},
}
KINDS = {
    "GPTQ_INT4": (auto_gptq, AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}),
    "AWQ_INT4": (auto_awq, AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}),
    "RAWINT4": (llm_compressor, COMPRESSED),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", KINDS)
def test_negative_scales_of_auto_round(tmp_path, method, dtype):
    """Values bit by bit, and a layer computed with them."""
    pack, quantization = KINDS[method]
    values = []

    def make(rows, columns):
        codes, scale, exact = int_sym(torch.randn(rows, columns) * 0.05, dtype=dtype)
        assert (scale < 0).any() and (scale > 0).any()
        values.append(exact)
        return {name: part.contiguous() for name, part in pack(codes, scale).items()}

    path = save(tmp_path, make_experts(make), quantization)
    each = iter(values)
    found = check_values(path, {}, method, lambda _: next(each))
    assert values_of(found.gate[0]).shape == (I, H)

    check_layer(path, method, [values[m::3] for m in range(3)])
