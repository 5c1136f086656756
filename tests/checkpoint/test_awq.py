"""AWQ checkpoints of version gemm, against the format's order of nibbles written out."""

import pytest
import torch
from quantised_files import H, I, check_bad_parts, check_values, fails, make_experts, save

from kt_kernel.weights.formats import INT4_GROUP, INT4_ZERO

# Bits 4i of a word hold column ORDER[i] of its eight.
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def config(**settings):
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "zero_point": True,
        "version": "gemm",
    } | settings


def pack(codes):
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.long)
    for i, column in enumerate(ORDER):
        words += codes[:, column::8] << 4 * i
    return torch.where(words >= 2**31, words - 2**32, words).int()


def unpack(words):
    codes = torch.empty(words.shape[0], 8 * words.shape[1], dtype=torch.long)
    for column in range(codes.shape[1]):
        shift = 4 * ORDER.index(column % 8)
        codes[:, column] = words[:, column // 8].long() >> shift & 15
    return codes


def make_with(group=32, dtype=torch.float16):
    def make(rows, columns):
        groups = columns // group if group > 0 else 1
        return {
            "qweight": pack(torch.randint(0, 16, (columns, rows))),
            "qzeros": pack(torch.randint(0, 16, (groups, rows))),
            "scales": (torch.rand(groups, rows) * 1e-2).to(dtype),
        }

    return make


def reference(parts):
    codes, zeros, scales = (
        unpack(parts["qweight"]),
        unpack(parts["qzeros"]),
        parts["scales"].double(),
    )
    group = torch.arange(codes.shape[0]) // (codes.shape[0] // scales.shape[0])
    return ((codes - zeros[group]) * scales[group]).T


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group", "hidden", "inter"), [(32, H, I), (64, H, I), (128, 256, 128)])
def test_values(tmp_path, dtype, group, hidden, inter):
    tensors = make_experts(make_with(group, dtype), hidden, inter)
    path = save(tmp_path, tensors, config(group_size=group))
    found = check_values(path, tensors, "AWQ_INT4", reference, hidden, inter)
    assert found.down[0].format == INT4_ZERO


def test_one_group_per_row(tmp_path):
    tensors = make_experts(make_with(-1))
    check_values(save(tmp_path, tensors, config(group_size=-1)), tensors, "AWQ_INT4", reference)


def test_told_from_gptq_by_shape(tmp_path):
    tensors = make_experts(make_with())
    check_values(save(tmp_path, tensors), tensors, "AWQ_INT4", reference)


@pytest.mark.parametrize(
    ("settings", "word"), [({"version": "gemv"}, "version 'gemv'"), ({"bits": 8}, "bits 8")]
)
def test_settings_that_are_not_known(tmp_path, settings, word):
    path = save(tmp_path, make_experts(make_with()), config(**settings))
    fails(path, "AWQ_INT4", word, "accepted", path / "config.json")


def test_bad_parts(tmp_path):
    tensors = make_experts(make_with())
    bad = (float("nan"), float("inf"), float("-inf"))
    check_bad_parts(tmp_path / "s", tensors, "AWQ_INT4", config(), "scales", bad_values=bad)
    for part in ("qweight", "qzeros"):
        check_bad_parts(tmp_path / part, tensors, "AWQ_INT4", config(), part)


def test_gptq_and_awq_are_not_mixed_up(tmp_path):
    """Where config.json contradicts the tensors, both are named."""
    path = save(tmp_path, make_experts(make_with()), {"quant_method": "gptq", "sym": False})
    words = "qweight", "as AWQ packs it", path / "config.json", "quant_method 'gptq'"
    fails(path, "GPTQ_INT4", *words)
    fails(path, "AWQ_INT4", *words)


def test_auto_round(tmp_path):
    """AutoRound packs as AWQ does where it says so."""
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False}
    settings["packing_format"] = "auto_round:auto_awq"
    tensors = make_experts(make_with())
    check_values(save(tmp_path / "a", tensors, settings), tensors, "AWQ_INT4", reference)
    symmetric = {
        name: pack(torch.full((len(tensor), 8 * tensor.shape[1]), 8)) if "zeros" in name else tensor
        for name, tensor in tensors.items()
    }
    path = save(tmp_path / "b", tensors, settings | {"sym": True})  # whatever the zeros are
    found = check_values(path, symmetric, "AWQ_INT4", reference)
    assert found.gate[0].format == INT4_GROUP
