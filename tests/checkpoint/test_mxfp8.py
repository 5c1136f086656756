"""MXFP8 checkpoints, against torch's float8 types."""

import pytest
import torch
from quantised_files import check_bad_parts, check_values, make_experts, save
from test_fp8 import codes


def make_with(name, dtype=torch.uint8):
    def make(rows, columns):
        scale = torch.randint(0, 255, (rows, columns // 32), dtype=torch.uint8)
        return {"weight": codes(rows, columns), name: scale.view(dtype)}

    return make


def reference(parts):
    weight = parts.pop("weight").double()
    (scale,) = parts.values()
    power = scale.view(torch.uint8).view(torch.float8_e8m0fnu).double()
    return (weight.unflatten(1, (-1, 32)) * power[..., None]).flatten(1)


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("inter", [64, 96])
def test_values(tmp_path, name, dtype, inter):
    tensors = make_experts(make_with(name, dtype), inter=inter)
    path = save(tmp_path, tensors, {"quant_method": "mxfp8"})
    check_values(path, tensors, "MXFP8", reference, inter=inter)


def test_bad_scales(tmp_path):
    tensors = make_experts(make_with("weight_scale"))
    check_bad_parts(tmp_path, tensors, "MXFP8", None, "weight_scale", bad_values=(255,))
