"""GPTQ checkpoints, against the maths of the format's own documentation, code by code."""

import json

import pytest
import torch
from quantised_files import H, I, check_bad_parts, check_values, fails, make_experts, save
from test_int4 import pack_int32, unpack_int32

from kt_kernel.checkpoint import open_checkpoint
from kt_kernel.weights.formats import INT4_GROUP, INT4_ZERO


def config(**settings):
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "checkpoint_format": "gptq",
    } | settings


def make_with(group=32, version=1, zero=None, order=None, dtype=torch.float16):
    def make(rows, columns):
        groups = columns // group if group > 0 else 1
        codes = torch.randint(0, 16, (rows, columns))
        stored = (
            torch.randint(0, 16, (groups, rows))
            if zero is None
            else torch.full((groups, rows), zero)
        )
        parts = {
            "qweight": pack_int32(codes.T, 0),
            "qzeros": pack_int32(stored, 1),
            "scales": (torch.rand(groups, rows) * 1e-2).to(dtype),
            "g_idx": torch.arange(columns, dtype=torch.int32) // (columns // groups),
        }
        if order is not None:
            parts["g_idx"] = order(columns)
        return parts

    return make


def with_zeros(tensors, zero):
    """The tensors with another zero point in all qzeros."""
    return {
        name: pack_int32(torch.full((len(tensor), 8 * tensor.shape[1]), zero), 1)
        if name.endswith("qzeros")
        else tensor
        for name, tensor in tensors.items()
    }


def reference(add_one):
    def values(parts):
        rows, columns = parts["scales"].shape[1], 8 * parts["qweight"].shape[0]
        codes = unpack_int32(parts["qweight"], 0, columns)
        zeros = unpack_int32(parts["qzeros"], 1, rows) + add_one
        group = parts["g_idx"].long()
        return ((codes - zeros[group]) * parts["scales"].double()[group]).T

    return values


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("group", "hidden", "inter"), [(32, H, I), (64, H, I), (128, 256, 128)])
def test_symmetric(tmp_path, dtype, group, hidden, inter):
    tensors = make_experts(make_with(group, zero=7, dtype=dtype), hidden, inter)
    path = save(tmp_path, tensors, config(group_size=group))
    found = check_values(path, tensors, "GPTQ_INT4", reference(1), hidden, inter)
    assert found.up[0].format == INT4_GROUP and found.up[0].zero is None


@pytest.mark.parametrize("version", ["gptq", "gptq_v2", None])
def test_asymmetric(tmp_path, version):
    """Version 1 stores the zero point less one, so a stored 15 is 16."""
    tensors = make_experts(make_with())
    path = save(tmp_path, tensors, config(sym=False, checkpoint_format=version))
    add_one = 0 if version == "gptq_v2" else 1
    found = check_values(path, tensors, "GPTQ_INT4", reference(add_one))
    assert found.up[0].format == INT4_ZERO
    assert found.up[0].zero.max() == 15 + add_one


def test_symmetric_of_version_2(tmp_path):
    tensors = make_experts(make_with(zero=8))
    path = save(tmp_path, tensors, config(checkpoint_format="gptq_v2"))
    assert check_values(path, tensors, "GPTQ_INT4", reference(0)).gate[0].format == INT4_GROUP


def test_one_group_per_row(tmp_path):
    tensors = make_experts(make_with(-1))
    path = save(tmp_path, tensors, config(sym=False, group_size=-1))
    found = check_values(path, tensors, "GPTQ_INT4", reference(1))
    assert found.gate[0].scale.shape == (I, H // 64)


def test_without_g_idx(tmp_path):
    tensors = make_experts(make_with())
    with_index = dict(tensors)
    tensors = {name: tensor for name, tensor in tensors.items() if "g_idx" not in name}
    path = save(tmp_path, tensors, config(sym=False))
    check_values(path, with_index, "GPTQ_INT4", reference(1))


@pytest.mark.parametrize(
    ("group", "desc_act", "indexed"), [(-1, True, True), (32, False, True), (32, True, False)]
)
def test_no_order_of_columns(tmp_path, group, desc_act, indexed):
    """One group per row, sorted groups, and groups without g_idx have none, whatever desc_act
    says: the headers tell it, and so do the values."""
    every = make_experts(make_with(group))
    tensors = {name: tensor for name, tensor in every.items() if indexed or "g_idx" not in name}
    path = save(tmp_path, tensors, config(sym=False, group_size=group, desc_act=desc_act))
    assert not open_checkpoint(path).in_activation_order
    assert check_values(path, every, "GPTQ_INT4", reference(1)).gate[0].order is None


def shuffled(columns, group=32):
    """Groups of equal sizes, any columns in each, as desc_act makes them."""
    return (torch.randperm(columns) // group).int()


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_desc_act(tmp_path, version, symmetric):
    add_one = version == "gptq"
    make = make_with(order=shuffled, zero=8 - add_one if symmetric else None)
    tensors = make_experts(make)
    path = save(tmp_path, tensors, config(sym=symmetric, desc_act=True, checkpoint_format=version))
    found = check_values(path, tensors, "GPTQ_INT4", reference(add_one))
    assert open_checkpoint(path).in_activation_order
    assert found.gate[0].format == (INT4_GROUP if symmetric else INT4_ZERO)
    for matrix in (found.gate[0], found.up[1], found.down[2]):
        columns = 2 * matrix.codes.shape[1]
        assert matrix.order.dtype == torch.int32
        assert torch.equal(matrix.order.sort().values, torch.arange(columns, dtype=torch.int32))
    assert not torch.equal(found.gate[0].order, found.up[0].order)


@pytest.mark.parametrize(
    "order",
    [
        lambda k: torch.arange(k).flip(0) // 64,  # groups from the last to the first
        lambda k: torch.arange(k) % (k // 64),  # interleaved; one group is in its own order
        lambda k: (torch.arange(k) + 1) % k // 64,  # one column of each group in the next
    ],
)
def test_orders_of_groups_of_64(tmp_path, order):
    tensors = make_experts(make_with(64, order=lambda k: order(k).long()))
    path = save(tmp_path, tensors, config(sym=False, group_size=64))
    check_values(path, tensors, "GPTQ_INT4", reference(1))


def test_the_setting_alone_orders_nothing(tmp_path):
    tensors = make_experts(make_with())
    path = save(tmp_path, tensors, config(sym=False, desc_act=True))
    assert check_values(path, tensors, "GPTQ_INT4", reference(1)).gate[0].order is None


@pytest.mark.parametrize(
    ("column", "group", "words"),
    [
        (5, -1, ["column 5 is in group -1", "0 to 5"]),
        (7, 6, ["column 7 is in group 6", "0 to 5"]),
        (9, 3, ["31 columns are in group 0", "expected 32 with 6 groups of 32 columns"]),
    ],
)
def test_groups_that_are_none(tmp_path, column, group, words):
    tensors = make_experts(make_with())
    name = next(n for n in tensors if n.endswith("2.up_proj.g_idx"))
    tensors[name][column] = group
    fails(save(tmp_path, tensors, config(sym=False)), "GPTQ_INT4", name, *words)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2", None])
@pytest.mark.parametrize("stored", [7, 8, 0, None])  # None: any
def test_sym_decides_over_stored_zeros(tmp_path, stored, version):
    tensors = make_experts(make_with(zero=stored))
    symmetric = with_zeros(tensors, 8)
    path = save(tmp_path, tensors, config(checkpoint_format=version))
    assert check_values(path, symmetric, "GPTQ_INT4", reference(0)).up[0].format == INT4_GROUP


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"bits": 8}, "bits 8"), ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'")],
)
def test_settings_that_are_not_known(tmp_path, settings, word):
    path = save(tmp_path, make_experts(make_with(zero=7)), config(**settings))
    fails(path, "GPTQ_INT4", word, "accepted", path / "config.json")


def test_auto_round(tmp_path):
    """AutoRound packs as GPTQ does, or says otherwise."""
    settings = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
    tensors = make_experts(make_with(zero=7))
    tensors = {name: t for name, t in tensors.items() if "g_idx" not in name}
    packing = {"packing_format": "auto_round:auto_gptq"}
    path = save(tmp_path / "a", tensors, settings | packing)
    check_values(path, make_experts(make_with(zero=7)), "GPTQ_INT4", reference(1))
    path = save(tmp_path / "b", tensors, settings | {"packing_format": "auto_round:auto_awq"})
    words = "as GPTQ packs it", "packing_format 'auto_round:auto_awq'"
    fails(path, "GPTQ_INT4", "qweight", path / "config.json", *words)


@pytest.mark.parametrize(
    ("packing", "add_one"),
    [("auto_round:auto_gptq", 1), ("auto_round", 0), ("auto_round:gptqmodel", 0)],
)
def test_zeros_of_auto_round(tmp_path, packing, add_one):
    """Two of its packings store the zero point itself."""
    settings = {"quant_method": "auto-round", "bits": 4, "sym": False, "packing_format": packing}
    tensors = make_experts(make_with())
    path = save(tmp_path, tensors, settings)
    check_values(path, tensors, "GPTQ_INT4", reference(add_one))


def test_an_unknown_packing(tmp_path):
    settings = config(quant_method="auto-round", sym=False, packing_format="auto_round:other")
    path = save(tmp_path, make_experts(make_with()), settings)
    fails(path, "GPTQ_INT4", "packing_format 'auto_round:other'", "accepted: auto_round:auto_gptq")


def test_the_first_pattern_that_matches_decides(tmp_path):
    """As GPTQModel reads its dynamic settings."""
    dynamic = {r"+:.*experts\.\d+\..*": {"sym": True}, "+:.*": {"sym": False, "bits": 8}}
    tensors = make_experts(make_with(zero=3))
    path = save(tmp_path, tensors, config(sym=False, dynamic=dynamic))
    symmetric = with_zeros(dict(tensors), 8)
    assert check_values(path, symmetric, "GPTQ_INT4", reference(0)).up[0].format == INT4_GROUP


def test_experts_with_settings_of_their_own(tmp_path):
    """The form of a matrix is one for all experts of a layer."""
    dynamic = {r"+:.*experts\.1\..*": {"sym": False}}
    path = save(tmp_path, make_experts(make_with(zero=7)), config(dynamic=dynamic))
    fails(path, "GPTQ_INT4", "experts.1.", "in another way than the first expert's")


def test_needs_its_config(tmp_path):
    path = save(tmp_path, make_experts(make_with()))
    fails(path, "GPTQ_INT4", "qweight", "quantization_config", "checkpoint_format")


def test_an_empty_config_says_nothing(tmp_path):
    """It neither counts as one nor hides the one of the language model."""
    path = save(tmp_path, make_experts(make_with(zero=7)), {})
    fails(path, "GPTQ_INT4", "qweight", "quantization_config", "checkpoint_format")
    both = {
        "model_type": "qwen3_moe",
        "quantization_config": {},
        "compression_config": {},
        "text_config": {"model_type": "qwen3_moe", "quantization_config": config()},
    }
    (path / "config.json").write_text(json.dumps(both))
    check_values(path, make_experts(make_with(zero=7)), "GPTQ_INT4", reference(1))


def test_bad_parts(tmp_path):
    tensors, settings = make_experts(make_with()), config(sym=False)
    bad = (float("nan"), float("inf"), float("-inf"))
    check_bad_parts(tmp_path / "s", tensors, "GPTQ_INT4", settings, "scales", bad_values=bad)
    for part in ("qweight", "qzeros", "g_idx"):
        check_bad_parts(tmp_path / part, tensors, "GPTQ_INT4", settings, part)
