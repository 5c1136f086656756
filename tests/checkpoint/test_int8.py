"""8-bit integers with scales per row or per group, against the arithmetic of their formats."""

import pytest
import test_gptq
import test_int4
import torch
from quantised_files import check_formats, fails, save, tensors_of

from kt_kernel.checkpoint import method_of, open_checkpoint, read_experts
from kt_kernel.weights.formats import INT8_ROW, Q8_0
from kt_kernel.weights.methods import METHODS
from kt_kernel.weights.quantised import check_matrix

E, H, I = 3, 192, 160  # noqa: E741


def pack_bytes(codes, dim):
    """Four 8-bit codes along dim to an int32, the first in the lowest bits."""
    codes = codes.movedim(dim, -1).long().unflatten(-1, (-1, 4))
    words = sum(codes[..., i] << 8 * i for i in range(4))
    return torch.where(words >= 2**31, words - 2**32, words).int().movedim(-1, dim).contiguous()


def unpack_bytes(words, dim):
    words = words.movedim(dim, -1).long().unsqueeze(-1)
    return (words >> torch.arange(0, 32, 8) & 255).flatten(-2).movedim(-1, dim)


def gptq8(rows, columns, group=32):
    count = -(-columns // group)
    scales = (torch.randn(count, rows) * 1e-3).half()
    scales[scales == 0] = 1e-3
    return {
        "qweight": pack_bytes(torch.randint(0, 256, (columns, rows)), 0),
        "qzeros": pack_bytes(torch.full((count, rows), 127), 1),
        "scales": scales,
        "g_idx": (torch.arange(columns) // group).int(),
    }


def gptq8_values(parts):
    group = parts["g_idx"].long()
    return ((unpack_bytes(parts["qweight"], 0) - 128) * parts["scales"].double()[group]).T


def w8a8(dtype=torch.float32, shape=(-1, 1), one=False):
    def make(rows, columns):
        codes = torch.randint(-127, 128, (rows, columns)).to(torch.int8)
        scale = torch.rand(1 if one else rows) * 1e-3 + 1e-4
        return {"weight": codes, "weight_scale": scale.to(dtype).reshape(shape)}

    return make


def scaled(parts):
    weight, scale = parts["weight"].double(), parts["weight_scale"].double()
    if scale.numel() in (1, len(weight)):
        return weight * scale.reshape(-1, 1)
    return weight * scale.repeat_interleave(weight.shape[1] // scale.shape[1], 1)


@pytest.mark.parametrize(
    "make",
    [
        w8a8(),
        w8a8(torch.bfloat16, (-1,)),
        w8a8(one=True, shape=()),
        w8a8(torch.float16, (1,), one=True),
    ],
)
def test_int8_per_row(tmp_path, make):
    tensors = tensors_of([make] * 3)
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    path = save(tmp_path, tensors, settings)
    choice = method_of(open_checkpoint(path))
    assert choice.method == "AMXINT8" and choice.reason == "8-bit integers with scales per row"
    for method in ("AMXINT8", "MOE_INT8"):
        found = check_formats(path, tensors, [scaled] * 3, method)
        kept = read_experts(path, 0, E, H, I, method="MIXED")
        assert torch.equal(kept.down[0].codes, found.down[0].codes)
        name = "model.layers.0.mlp.experts.1.up_proj.weight"
        assert found.up[1].format == INT8_ROW and torch.equal(found.up[1].codes, tensors[name])
    fails(path, "RAWINT4", "8-bit integers", "method AMXINT8 reads", hidden=H, inter=I)


def test_negative_scales_of_rows(tmp_path):
    """AutoRound's W8A8: the row's extreme value has code -128, which has no opposite."""

    def make(rows, columns):
        parts = w8a8()(rows, columns)
        parts["weight"][:, 7] = -128
        parts["weight_scale"][::2] *= -1
        return parts

    tensors = tensors_of([make] * 3)
    found = check_formats(save(tmp_path, tensors), tensors, [scaled] * 3, "AMXINT8")
    assert (found.gate[0].scale < 0).sum() == I // 2


def int8_groups(dtype):
    def make(rows, columns):
        scale = (torch.randn(rows, columns // 32) * 1e-3).to(dtype)
        scale[scale.abs() < 1e-4] = 2.0**-10
        codes = torch.randint(-128, 128, (rows, columns)).to(torch.int8)
        return {"weight": codes, "weight_scale": scale}

    return make


def packed8(rows, columns):
    parts = int8_groups(torch.bfloat16)(rows, columns)
    codes = parts.pop("weight").long() + 128
    return parts | {
        "weight_packed": pack_bytes(codes, 1),
        "weight_shape": torch.tensor([rows, columns]),
    }


def packed8_values(parts):
    codes = (unpack_bytes(parts["weight_packed"], 1) - 128).to(torch.int8)
    return scaled({"weight": codes, "weight_scale": parts["weight_scale"]})


GROUPS_OF_8 = {
    "GPTQ": (gptq8, gptq8_values, test_gptq.config(bits=8)),
    "pack-quantized": (packed8, packed8_values, test_int4.config(bits=8)),
    "int-quantized": (int8_groups(torch.float16), scaled, {"quant_method": "compressed-tensors"}),
    "bfloat16 scales": (int8_groups(torch.bfloat16), scaled, None),
}


@pytest.mark.parametrize("kind", GROUPS_OF_8)
def test_int8_groups(tmp_path, kind):
    make, reference, config = GROUPS_OF_8[kind]
    tensors = tensors_of([make] * 3)
    path = save(tmp_path, tensors, config)
    assert method_of(open_checkpoint(path)).method == "MIXED"
    found = check_formats(path, tensors, [reference] * 3, "MIXED")
    matrix = found.down[1]
    assert matrix.format == Q8_0
    check_matrix("down", matrix, METHODS["MIXED"].formats, H, I)


def test_int8_groups_that_are_not_kept(tmp_path):
    tensors = tensors_of([int8_groups(torch.float32)] * 3)
    path = save(tmp_path / "a", tensors)
    fails(path, "MIXED", "0.gate_proj.weight_scale", "which float16 rounds", hidden=H, inter=I)
    path = save(tmp_path / "b", tensors_of([gptq8] * 3), test_gptq.config(bits=8, sym=False))
    fails(path, "MIXED", "8 bits", "sym: true", "symmetric", hidden=H, inter=I)

    def shuffled(rows, columns):
        return gptq8(rows, columns) | {"g_idx": test_gptq.shuffled(columns)}

    path = save(tmp_path / "c", tensors_of([shuffled] * 3), test_gptq.config(bits=8))
    fails(path, "MIXED", "gate_proj.g_idx", "desc_act", "consecutive", hidden=H, inter=I)
