"""NVFP4 of ModelOpt and of compressed-tensors, against table and torch's float8."""

import pytest
import torch
from quantised_files import E, H, I, check_bad_parts, check_values, fails, make_experts, save

from kt_kernel.checkpoint import read_experts

TABLE = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()


def make_with(codes, whole, shape=()):
    def make(rows, columns):
        scale = torch.randint(0, 0x7F, (rows, columns // 16), dtype=torch.uint8)
        return {
            codes: torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
            "weight_scale": scale.view(torch.float8_e4m3fn),
            whole: (torch.rand(1) + 0.1).reshape(shape),
            "input_scale": torch.rand(1),
        }

    return make


MODELOPT = make_with("weight", "weight_scale_2")
COMPRESSED = make_with("weight_packed", "weight_global_scale", (1,))


def values(codes, scale, whole):
    unpacked = TABLE[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
    spread = scale.double().repeat_interleave(16, 1)
    return unpacked * spread * float(torch.tensor(whole, dtype=torch.float32))


def modelopt_values(parts):
    return values(parts["weight"], parts["weight_scale"], float(parts["weight_scale_2"]))


def test_modelopt(tmp_path):
    tensors = make_experts(MODELOPT)
    found = check_values(
        save(tmp_path, tensors, {"quant_method": "modelopt"}),
        tensors,
        "NVFP4",
        modelopt_values,
    )
    assert len({m.global_scale for m in found.gate + found.up + found.down}) == 3 * E


def test_compressed_tensors(tmp_path):
    tensors = make_experts(COMPRESSED)
    check_values(
        save(tmp_path, tensors, {"quant_method": "compressed-tensors"}),
        tensors,
        "NVFP4",
        lambda parts: values(
            parts["weight_packed"], parts["weight_scale"], 1 / float(parts["weight_global_scale"])
        ),
    )


def test_projection_before_the_number(tmp_path):
    """As ModelOpt names the experts of models whose own are in stacks."""
    tensors = make_experts(MODELOPT)
    swapped = {}
    for name, tensor in tensors.items():
        before, number, projection, part = name.rsplit(".", 3)
        swapped[f"{before}.{projection}.{number}.{part}"] = tensor
    check_values(
        save(tmp_path / "a", swapped, model_type="qwen3_vl_moe"), tensors, "NVFP4", modelopt_values
    )
    name = next(n for n in swapped if ".up_proj.1.weight" in n)
    del swapped[name]
    path = save(tmp_path / "b", swapped, model_type="qwen3_vl_moe")
    fails(path, "NVFP4", "experts.1.up_proj", "missing")


def test_sizes_that_are_multiples_of_16(tmp_path):
    tensors = make_experts(MODELOPT, 80, 48)
    check_values(
        save(tmp_path, tensors),
        tensors,
        "NVFP4",
        modelopt_values,
        80,
        48,
    )


def test_bad_parts(tmp_path):
    tensors = make_experts(MODELOPT)
    nan, inf = float("nan"), float("inf")
    check_bad_parts(tmp_path / "a", tensors, "NVFP4", None, "weight_scale", bad_values=(nan, -0.5))
    check_bad_parts(
        tmp_path / "b", tensors, "NVFP4", None, "weight_scale_2", bad_values=(nan, inf, -0.5)
    )
    check_bad_parts(tmp_path / "c", tensors, "NVFP4", None, "weight")
    tensors = make_experts(COMPRESSED)
    check_bad_parts(
        tmp_path / "d",
        tensors,
        "NVFP4",
        None,
        "weight_global_scale",
        bad_values=(nan, inf, -0.5, 0),
    )


@pytest.mark.parametrize("make", [MODELOPT, COMPRESSED])
def test_as_stored(tmp_path, make):
    found = read_experts(save(tmp_path, make_experts(make)), 0, E, H, I)
    assert found.gate[0].codes.shape == (I, H // 2) and found.down[0].scale.shape == (H, I // 16)
