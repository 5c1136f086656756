"""compressed-tensors' pack-quantized INT4 (RAWINT4), against its documented layout, bit by bit."""

import pytest
import torch
from quantised_files import H, I, check_bad_parts, check_values, fails, make_experts, save

from kt_kernel.checkpoint import open_checkpoint
from kt_kernel.weights.formats import INT4_GROUP, INT4_ZERO


def config(bits=4, **weights):
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "group_size": 32} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
    }


def pack_int32(codes, dim):
    """Eight codes along dim to an int32, the first in the lowest bits; padded with zeros."""
    codes = codes.movedim(dim, -1).long()
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 8)).unflatten(-1, (-1, 8))
    words = sum(codes[..., i] << 4 * i for i in range(8))
    return torch.where(words >= 2**31, words - 2**32, words).int().movedim(-1, dim).contiguous()


def unpack_int32(words, dim, count):
    """The reverse, one code at a time."""
    words = words.movedim(dim, -1).long()
    codes = [words[..., i // 8] >> 4 * (i % 8) & 15 for i in range(count)]
    return torch.stack(codes, -1).movedim(-1, dim)


def make_with(group=32, dtype=torch.bfloat16, packed="int32", zero=False, order=None, shape=True):
    def make(rows, columns):
        groups = columns // group if group else 1
        codes = torch.randint(0, 16, (rows, columns))
        parts = {
            "weight_packed": pack_int32(codes, 1),
            "weight_scale": (torch.rand(rows, groups) * 1e-2).to(dtype),
        }
        if packed == "uint8":
            parts["weight_packed"] = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
        if zero:
            parts["weight_zero_point"] = pack_int32(torch.randint(0, 16, (rows, groups)), 0)
        if shape:
            parts["weight_shape"] = torch.tensor([rows, columns])
        if order is not None:
            parts["weight_g_idx"] = order(columns)
        return parts

    return make


def reference(parts):
    scale = parts["weight_scale"].double()
    rows = scale.shape[0]
    if parts["weight_packed"].dtype == torch.uint8:
        pairs = parts["weight_packed"].long()
        codes = torch.empty(rows, 2 * pairs.shape[1], dtype=torch.long)
        codes[:, 0::2], codes[:, 1::2] = pairs % 16, pairs // 16
    else:
        codes = unpack_int32(parts["weight_packed"], 1, 8 * parts["weight_packed"].shape[1])
    group = torch.arange(codes.shape[1]) // (codes.shape[1] // scale.shape[1])
    if parts.get("weight_g_idx", group).min() >= 0:
        group = parts.get("weight_g_idx", group).long()
    # compressed-tensors stores signed values plus 8, zero points too
    zero = torch.zeros(scale.shape, dtype=torch.long)
    if "weight_zero_point" in parts:
        zero = unpack_int32(parts["weight_zero_point"], 0, rows) - 8
    return (codes - 8 - zero[:, group]) * scale[:, group]


@pytest.mark.parametrize("packed", ["int32", "uint8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("group", "hidden", "inter"), [(32, H, I), (64, H, I), (128, 256, 128)])
def test_values(tmp_path, packed, dtype, group, hidden, inter):
    tensors = make_experts(make_with(group, dtype, packed), hidden, inter)
    path = save(tmp_path, tensors, config(group_size=group))
    found = check_values(path, tensors, "RAWINT4", reference, hidden, inter)
    assert found.gate[0].format == INT4_GROUP
    assert found.gate[0].scale.dtype == dtype and found.down[1].scale.shape == (
        hidden,
        inter // group,
    )


@pytest.mark.parametrize("inter", [64, 96])  # 96 rows and 6 groups: nothing is square
def test_zero_points(tmp_path, inter):
    tensors = make_experts(make_with(zero=True), H, inter)
    path = save(tmp_path, tensors, config(symmetric=False))
    found = check_values(path, tensors, "RAWINT4", reference, H, inter)
    assert found.gate[0].format == INT4_ZERO


@pytest.mark.parametrize("zero", [False, True])
def test_one_scale_per_row(tmp_path, zero):
    tensors = make_experts(make_with(0, zero=zero))
    settings = config(strategy="channel", group_size=None, symmetric=not zero)
    path = save(tmp_path, tensors, settings)
    found = check_values(path, tensors, "RAWINT4", reference)
    assert found.gate[0].scale.shape == (I, H // 64)


ORDERS = {
    "natural": lambda k: torch.arange(k, dtype=torch.int32) // 32,
    "unset": lambda k: torch.full((k,), -1, dtype=torch.int32),
    "interleaved": lambda k: torch.arange(k, dtype=torch.int32) % (k // 32),
    "shuffled": lambda k: torch.randperm(k) // 32,
}


@pytest.mark.parametrize("packed", ["int32", "uint8"])
@pytest.mark.parametrize("order", ORDERS)
def test_order_of_columns(tmp_path, order, packed):
    """actorder; -1 everywhere is what compressed-tensors begins with, and means none."""
    tensors = make_experts(make_with(packed=packed, zero=True, order=ORDERS[order]))
    path = save(tmp_path, tensors, config(symmetric=False, actorder="group"))
    found = check_values(path, tensors, "RAWINT4", reference)
    assert (found.gate[0].order is None) == (order in ("natural", "unset"))
    assert open_checkpoint(path).in_activation_order  # as far as the headers tell


def test_one_group_per_row_has_no_order(tmp_path):
    tensors = make_experts(make_with(0, order=lambda k: torch.zeros(k, dtype=torch.int32)))
    path = save(tmp_path, tensors, config(actorder="group", group_size=-1))
    found = check_values(path, tensors, "RAWINT4", reference)
    assert found.gate[0].order is None and not open_checkpoint(path).in_activation_order


def test_groups_that_are_none(tmp_path):
    tensors = make_experts(make_with(order=ORDERS["shuffled"]))
    name = next(n for n in tensors if n.endswith("1.gate_proj.weight_g_idx"))
    for number, (value, word) in enumerate([(-1, "in group -1"), (6, "in group 6")]):
        changed = tensors[name].clone()
        changed[17] = value
        path = save(tmp_path / str(number), tensors | {name: changed}, config())
        fails(path, "RAWINT4", name, "column 17", word, "0 to 5")


def test_bad_parts(tmp_path):
    tensors = make_experts(make_with(zero=True))
    bad = (float("nan"), float("inf"), float("-inf"))
    check_bad_parts(tmp_path / "s", tensors, "RAWINT4", None, "weight_scale", bad_values=bad)
    check_bad_parts(tmp_path / "p", tensors, "RAWINT4", None, "weight_packed")
    check_bad_parts(tmp_path / "z", tensors, "RAWINT4", None, "weight_zero_point")
    check_bad_parts(tmp_path / "n", tensors, "RAWINT4", None, "weight_shape")


def test_symmetric_decides_over_stored_zeros(tmp_path):
    tensors = make_experts(make_with(zero=True))
    path = save(tmp_path, tensors, config(symmetric=True))
    plain = {name: tensor for name, tensor in tensors.items() if "zero_point" not in name}
    assert check_values(path, plain, "RAWINT4", reference).up[0].format == INT4_GROUP


def test_a_shape_that_disagrees(tmp_path):
    tensors = make_experts(make_with())
    name = next(n for n in tensors if n.endswith("2.down_proj.weight_shape"))
    tensors[name] = torch.tensor([H, I + 1])
    fails(save(tmp_path, tensors), "RAWINT4", name, [H, I + 1], [H, I])


def test_other_bits(tmp_path):
    path = save(tmp_path, make_experts(make_with()), config(bits=8))
    fails(path, "RAWINT4", "num_bits 8", "accepted: 4", path / "config.json")


def test_groups_that_no_kernel_takes(tmp_path):
    fails(save(tmp_path, make_experts(make_with(16))), "RAWINT4", "group has 16", "32")


def test_scales_of_two_types(tmp_path):
    tensors = make_experts(make_with())
    name = next(n for n in tensors if n.endswith("1.up_proj.weight_scale"))
    tensors[name] = tensors[name].half()
    fails(save(tmp_path, tensors), "RAWINT4", name, "F16")
