"""FP8 checkpoints: block, row and matrix scales under all their names, against torch's float8."""

import pytest
import torch
from quantised_files import E, H, I, check_bad_parts, check_values, fails, make_experts, save

from kt_kernel.checkpoint import read_experts
from kt_kernel.weights.formats import FP8_BLOCK, FP8_ROW

RAGGED = 200, 130  # no multiple of the blocks of 128
DEEPSEEK = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}


def codes(rows, columns):
    """Every code but the two NaNs."""
    code = torch.randint(0, 254, (rows, columns), dtype=torch.uint8)
    return (code + (code >= 0x7F)).view(torch.float8_e4m3fn)


def block(name, dtype=torch.float32):
    def make(rows, columns):
        scale = torch.rand(-(-rows // 128), -(-columns // 128)) * 1e-2
        return {"weight": codes(rows, columns), name: scale.to(dtype)}

    return make


def block_reference(parts):
    weight = parts.pop("weight").double()
    (scale,) = parts.values()
    wanted = torch.empty_like(weight)
    for row in range(0, weight.shape[0], 128):
        for column in range(0, weight.shape[1], 128):
            here = slice(row, row + 128), slice(column, column + 128)
            wanted[here] = weight[here] * scale[row // 128, column // 128].double()
    return wanted


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "inter"), [RAGGED, (256, 128), (1, 1)])
def test_blocks(tmp_path, name, dtype, hidden, inter):
    tensors = make_experts(block(name, dtype), hidden, inter)
    found = check_values(
        save(tmp_path, tensors, DEEPSEEK), tensors, "FP8", block_reference, hidden, inter
    )
    assert found.gate[0].format == FP8_BLOCK


def test_block_scales_that_are_powers_of_two(tmp_path):
    def make(rows, columns):
        shape = -(-rows // 128), -(-columns // 128)
        scale = torch.randint(0, 255, shape, dtype=torch.uint8)
        return {
            "weight": codes(rows, columns),
            "weight_scale_inv": scale.view(torch.float8_e8m0fnu),
        }

    def reference(parts):
        power = 2.0 ** (parts["weight_scale_inv"].view(torch.uint8).double() - 127)
        return block_reference({"weight": parts["weight"], "scale": power})

    tensors = make_experts(make, 384, 256)
    check_values(save(tmp_path, tensors), tensors, "FP8", reference, 384, 256)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_a_matrix(tmp_path, shape):
    def make(rows, columns):
        return {
            "weight": codes(rows, columns),
            "weight_scale": torch.rand(1).reshape(shape),
            "input_scale": torch.rand(1),
        }

    tensors = make_experts(make, *RAGGED)
    path = save(tmp_path, tensors, {"quant_method": "compressed-tensors"})
    check_values(
        path,
        tensors,
        "FP8",
        lambda parts: parts["weight"].double() * parts["weight_scale"].double(),
        *RAGGED,
    )


def per_row(shape, dtype=torch.float32):
    def make(rows, columns):
        scale = (torch.rand(rows) * 1e-2).to(dtype)
        return {"weight": codes(rows, columns), "weight_scale": scale.reshape(-1, *shape)}

    return make


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows(tmp_path, shape, dtype):
    tensors = make_experts(per_row(shape, dtype), *RAGGED)
    found = check_values(
        save(tmp_path, tensors, {"quant_method": "compressed-tensors"}),
        tensors,
        "FP8_PERCHANNEL",
        lambda parts: parts["weight"].double() * parts["weight_scale"].double().reshape(-1, 1),
        *RAGGED,
    )
    assert found.down[2].format == FP8_ROW


@pytest.mark.parametrize("method", ["AMXINT8", "INT4_G32", "BF16"])
@pytest.mark.parametrize("make", [block("weight_scale_inv"), per_row(())])
def test_methods_that_quantise_get_float32(tmp_path, method, make):
    tensors = make_experts(make)
    path = save(tmp_path, tensors)
    stored = read_experts(path, 0, E, H, I)
    found = read_experts(path, 0, E, H, I, method=method)
    for matrix in ("gate", "up", "down"):
        for plain, quantised in zip(getattr(found, matrix), getattr(stored, matrix), strict=True):
            scale = quantised.scale
            if quantised.format == FP8_ROW:
                spread = scale[:, None]
            else:
                rows, columns = plain.shape
                spread = scale.repeat_interleave(128, 0)[:rows]
                spread = spread.repeat_interleave(128, 1)[:, :columns]
            assert plain.dtype == torch.float32
            assert torch.equal(plain, quantised.codes.float() * spread)


def test_bad_scales(tmp_path):
    bad = (float("nan"), float("inf"), -0.5)
    tensors = make_experts(block("weight_scale_inv"))
    check_bad_parts(
        tmp_path / "block", tensors, "FP8", DEEPSEEK, "weight_scale_inv", bad_values=bad
    )
    tensors = make_experts(per_row(()))
    check_bad_parts(
        tmp_path / "row", tensors, "FP8_PERCHANNEL", None, "weight_scale", bad_values=bad
    )


def test_the_other_e4m3(tmp_path):
    def make(rows, columns):
        parts = block("weight_scale")(rows, columns)
        return parts | {"weight": parts["weight"].view(torch.uint8).view(torch.float8_e4m3fnuz)}

    fails(save(tmp_path, make_experts(make)), "FP8", "proj.weight", "F8_E4M3FNUZ", "bias")


def test_other_blocks(tmp_path):
    quantization = DEEPSEEK | {"weight_block_size": [64, 64]}
    path = save(tmp_path, make_experts(block("weight_scale_inv")), quantization)
    fails(path, "FP8", "weight_block_size [64, 64]", "[128, 128]", path / "config.json")
