"""MXFP4 in its three namings, against transformers' own dequantisation of gpt-oss's blocks."""

import pytest
import torch
from quantised_files import W123, E, H, I, check_bad_parts, check_values, fails, make_experts, save

from kt_kernel.checkpoint import open_checkpoint, read_experts
from kt_kernel.testing import values_of

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")


def dequantise(codes, scales):
    """float32 [N, K] of bytes [N, K/2] and codes [N, K/32]. Scales of 2^-120 to 2^120: exact."""
    blocks = codes.view(torch.uint8).reshape(1, *scales.shape, 16)
    # transformers gives [1, K, N]
    return mxfp4.convert_moe_packed_tensors(
        blocks, scales.view(torch.uint8)[None], dtype=torch.float32
    )[0].T.float()


def matrix(rows, columns):
    return (
        torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
        torch.randint(7, 248, (rows, columns // 32), dtype=torch.uint8),
    )


def test_every_code_and_scale(tmp_path):
    """All bytes in each of the 255 scales; the smallest and largest by their definition."""

    def make(rows, columns):
        codes = torch.arange(256, dtype=torch.uint8).repeat(rows, columns // 512)
        scale = torch.arange(rows) % 255
        return {
            "weight": codes,
            "scale": scale.to(torch.uint8)[:, None].expand(rows, columns // 32),
        }

    def reference(parts):
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double()
        table = torch.cat([table, -table])
        codes = torch.stack([parts["weight"] & 15, parts["weight"] >> 4], -1).flatten(1)
        power = 2.0 ** (parts["scale"].double() - 127)
        return table[codes.long()] * power.repeat_interleave(32, 1)

    tensors = make_experts(make, 512, 512)
    check_values(save(tmp_path, tensors), tensors, "MXFP4", reference, 512, 512)


@pytest.mark.parametrize("scale", [torch.uint8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("codes", [torch.uint8, torch.int8, torch.float4_e2m1fn_x2])
def test_deepseek(tmp_path, codes, scale):
    where = "layers.0.ffn.experts"

    def make(rows, columns):
        found = matrix(rows, columns)
        return {"weight": found[0].view(codes), "scale": found[1].view(scale)}

    tensors = make_experts(make, where=where, names=W123)
    path = save(tmp_path, tensors, {"quant_method": "fp8"}, "deepseek_v4")
    check_values(
        path,
        tensors,
        "MXFP4",
        lambda parts: dequantise(parts["weight"], parts["scale"]),
        where=where,
        names=W123,
    )


def compressed(rows, columns):
    codes, scale = matrix(rows, columns)
    return {"weight_packed": codes, "weight_scale": scale}


def test_compressed_tensors(tmp_path):
    tensors = make_experts(compressed)
    path = save(tmp_path, tensors, {"quant_method": "compressed-tensors"})
    check_values(
        path,
        tensors,
        "MXFP4",
        lambda parts: dequantise(parts["weight_packed"], parts["weight_scale"]),
    )


def gpt_oss(hidden=H, inter=I):
    """One layer as gpt-oss has it."""
    torch.manual_seed(0)
    base = "model.layers.0.mlp.experts"
    tensors = {}
    for name, rows, columns in (("gate_up", 2 * inter, hidden), ("down", hidden, inter)):
        found = [matrix(rows, columns) for _ in range(E)]
        blocks = torch.stack([codes for codes, _ in found])
        tensors[f"{base}.{name}_proj_blocks"] = blocks.reshape(E, rows, columns // 32, 16)
        tensors[f"{base}.{name}_proj_scales"] = torch.stack([scale for _, scale in found])
        tensors[f"{base}.{name}_proj_bias"] = torch.randn(E, rows).bfloat16()
    return base, tensors


GPT_OSS = {"quant_method": "mxfp4"}


@pytest.mark.parametrize(("hidden", "inter"), [(H, I), (64, 64), (64, 32)])
def test_gpt_oss(tmp_path, hidden, inter):
    base, tensors = gpt_oss(hidden, inter)
    path = save(tmp_path, tensors, GPT_OSS, "gpt_oss")
    assert open_checkpoint(path).sizes(0) == (E, hidden, inter)
    found = read_experts(path, 0, E, hidden, inter, method="MXFP4")
    # What transformers gives is for x @ W: [E, H, 2I] and [E, I, H].
    gate_up, down = (
        mxfp4.convert_moe_packed_tensors(
            tensors[f"{base}.{name}_proj_blocks"],
            tensors[f"{base}.{name}_proj_scales"],
            dtype=torch.float32,
        )
        for name in ("gate_up", "down")
    )
    bias = tensors[f"{base}.gate_up_proj_bias"].float()
    for e in range(E):
        assert torch.equal(values_of(found.gate[e]), gate_up[e, :, 0::2].T.double())
        assert torch.equal(values_of(found.up[e]), gate_up[e, :, 1::2].T.double())
        assert torch.equal(values_of(found.down[e]), down[e].T.double())
        assert torch.equal(found.gate_bias[e], bias[e, 0::2])
        assert torch.equal(found.up_bias[e], bias[e, 1::2])
        assert torch.equal(found.down_bias[e], tensors[f"{base}.down_proj_bias"][e].float())


@pytest.mark.parametrize("part", ["blocks", "scales", "bias"])
@pytest.mark.parametrize("name", ["gate_up", "down"])
def test_bad_stacks(tmp_path, part, name):
    base, tensors = gpt_oss()
    name = f"{base}.{name}_proj_{part}"
    good = tensors[name]

    def broken(value, *words):
        other = {n: t for n, t in tensors.items() if n != name}
        if value is not None:
            other[name] = value
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        fails(save(folder, other, GPT_OSS, "gpt_oss"), "MXFP4", name, *words)

    broken(None, "missing")
    broken(good[:, :-1], list(good[:, :-1].shape))
    broken(good.double(), "F64")
    if part == "scales":
        nan = good.clone()
        nan[1, 2, 0] = 255
        broken(nan, 255, "accepted")


def test_stack_of_another_model(tmp_path):
    _, tensors = gpt_oss()
    fails(save(tmp_path, tensors, GPT_OSS, "strange"), "MXFP4", "proj_blocks", "'strange'")


@pytest.mark.parametrize("names", [("gate_up_proj", "down_proj"), ("down_proj_extra",)])
def test_blocks_beside_something_else(tmp_path, names):
    base, tensors = gpt_oss()
    for name in names:
        tensors[f"{base}.{name}"] = torch.ones(1)
    fails(save(tmp_path, tensors, GPT_OSS, "gpt_oss"), "MXFP4", f"{base}.", "unexpected tensor")


def test_bad_parts(tmp_path):
    tensors = make_experts(compressed)
    check_bad_parts(tmp_path / "c", tensors, "MXFP4", None, "weight_packed")
    check_bad_parts(tmp_path / "s", tensors, "MXFP4", None, "weight_scale", bad_values=(255,))


def test_columns_that_are_no_multiple(tmp_path):
    tensors = make_experts(compressed, 64, 32)
    path = save(tmp_path, tensors)
    fails(path, "MXFP4", "columns", "multiples of 32", hidden=80, inter=32)
