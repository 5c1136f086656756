"""Checkpoints whose layers and matrices are in different formats, or in groups of different sizes:
each matrix keeps its own values, and `auto` finds a method for all of them."""

import pytest
import test_awq
import test_fp8
import test_gptq
import test_int4
import test_int8
import test_nvfp4
import torch
from quantised_files import E, check_formats, fails, load_layer, save, tensors_of
from test_methods import CHECKPOINTS

from kt_kernel.checkpoint import method_of, open_checkpoint, read_experts
from kt_kernel.checkpoint.header import TensorInfo
from kt_kernel.checkpoint.safetensors.groups import groups_of
from kt_kernel.testing import values_of
from kt_kernel.weights.formats import BF16, INT4_GROUP, INT4_ZERO, INT8_ROW, Q8_0
from kt_kernel.weights.methods import METHODS
from kt_kernel.weights.quantised import QuantisedMatrix

H, I = 192, 160  # noqa: E741
NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
QUANTISING = [name for name, method in METHODS.items() if not method.quantised]


def dense(rows, columns):
    return {"weight": (torch.randn(rows, columns) * 0.05).bfloat16()}


def load(path, method, layer=0, inter=I):
    return load_layer(path, method, H, inter, layer)


def dense_values(parts):
    return parts["weight"].double()


# ---- by layer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", CHECKPOINTS)
def test_a_layer_that_is_not_quantised(tmp_path, stored):
    """The method of the other layers keeps it in bfloat16. Methods that quantise convert both;
    other methods are refused."""
    make, quantization = CHECKPOINTS[stored]
    path = save(tmp_path, tensors_of([dense] * 3, [make] * 3, inter=64), quantization)
    choice = method_of(open_checkpoint(path))
    assert choice.method == stored
    assert choice.reason.startswith("16- or 32-bit weights in layer 0; ")
    for method in (stored, "MIXED", *QUANTISING):
        for layer in (0, 1):
            found = read_experts(path, layer, E, H, 64, method=method)
            kept = layer == 1 and METHODS[method].quantised
            assert isinstance(found.down[2], QuantisedMatrix) == kept
    for layer in (0, 1):
        form = load(path, stored, layer, inter=64)._form
        assert {one.format == BF16 for one in form} == {layer == 0}
    other = next(name for name in CHECKPOINTS if name != stored)
    fails(path, other, "not quantised (BF16)", f"method {other}", hidden=H, inter=64)


def test_a_checkpoint_that_is_not_quantised_at_all(tmp_path):
    path = save(tmp_path, tensors_of([dense] * 3))
    fails(path, "AWQ_INT4", "not quantised (BF16)", "method AWQ_INT4", hidden=H, inter=I)
    assert method_of(open_checkpoint(path)).method == "INT4_G32"
    assert {one.format for one in load(path, "MIXED")._form} == {BF16}


def test_layers_of_two_formats(tmp_path):
    nvfp4, fp8 = CHECKPOINTS["NVFP4"][0], test_fp8.per_row(())
    path = save(tmp_path, tensors_of([nvfp4] * 3, [fp8] * 3), {"quant_method": "modelopt"})
    choice = method_of(open_checkpoint(path))
    assert choice.method == "MIXED"
    assert choice.reason == "NVFP4 in layer 0; FP8 with scales per row in layer 1"
    for layer in (0, 1):
        load(path, choice.method, layer)
    fails(path, "FP8_PERCHANNEL", "NVFP4", "method FP8_PERCHANNEL was", hidden=H, inter=I)


def test_dense_layers_beside_int8(tmp_path):
    """AMXINT8 would quantise the dense layer, so auto does not choose it."""
    path = save(
        tmp_path,
        tensors_of(
            [dense] * 3, [test_int8.w8a8()] * 3, [test_int8.w8a8(), dense, test_int8.w8a8()]
        ),
    )
    assert method_of(open_checkpoint(path)).method == "MIXED"
    assert {one.format for one in load(path, "MIXED", 0)._form} == {BF16}
    for layer in range(3):
        assert {one.format for one in load(path, "AMXINT8", layer)._form} == {INT8_ROW}


# ---- by matrix --------------------------------------------------------------------------------

AWQ, GPTQ = test_awq.make_with(), test_gptq.make_with(zero=7)


def test_eight_bits_in_down_and_four_elsewhere(tmp_path):
    """As GPTQModel and AutoRound write it, with settings by module."""
    tensors = tensors_of([GPTQ, GPTQ, test_int8.gptq8])
    four = test_gptq.reference(1)
    dynamic = {"+:.*down_proj": {"bits": 8}, "-:.*lm_head": {}}
    path = save(tmp_path / "dynamic", tensors, test_gptq.config(dynamic=dynamic))
    choice = method_of(open_checkpoint(path))
    assert choice.method == "MIXED" and choice.reason == "gate and up GPTQ, down GPTQ (Q8_0)"
    found = check_formats(path, tensors, [four, four, test_int8.gptq8_values], "MIXED")
    assert found.gate[0].format == INT4_GROUP and found.down[0].format == Q8_0
    fails(path, "GPTQ_INT4", "down_proj", "method MIXED reads", hidden=H, inter=I)
    extra = {n.rpartition(".")[0]: {"bits": 8} for n in tensors if "down_proj" in n}
    config = test_gptq.config(quant_method="auto-round", extra_config=extra)
    path = save(tmp_path / "extra", tensors, config)
    check_formats(path, tensors, [four, four, test_int8.gptq8_values], "MIXED")
    path = save(tmp_path / "none", tensors, test_gptq.config())
    fails(path, "MIXED", "down_proj", "bits 4", "accepted: 8", hidden=H, inter=I)


def test_nvfp4_beside_fp8(tmp_path):
    tensors = tensors_of([CHECKPOINTS["NVFP4"][0]] * 2 + [test_fp8.per_row(())])
    path = save(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"})
    assert method_of(open_checkpoint(path)).method == "MIXED"
    values = test_nvfp4.modelopt_values
    fp8 = lambda p: p["weight"].double() * p["weight_scale"].double().reshape(-1, 1)  # noqa: E731
    check_formats(path, tensors, [values, values, fp8], "MIXED")


def test_a_dense_matrix_beside_awq(tmp_path):
    tensors = tensors_of([AWQ, AWQ, dense])
    path = save(tmp_path, tensors, test_awq.config(modules_to_not_convert=["down_proj"]))
    assert method_of(open_checkpoint(path)).method == "AWQ_INT4"
    for method in ("AWQ_INT4", "MIXED"):
        check_formats(path, tensors, [test_awq.reference] * 2 + [dense_values], method)


def test_groups_that_differ_by_matrix(tmp_path):
    makes = [test_gptq.make_with(group, zero=7) for group in (96, 64, 32)]
    tensors = tensors_of(makes)
    path = save(tmp_path, tensors, test_gptq.config(group_size=96))
    found = check_formats(path, tensors, [test_gptq.reference(1)] * 3, "GPTQ_INT4")
    assert [getattr(found, m)[0].scale.shape[1] for m in NAMES] == [2, 3, 5]


def test_an_order_of_columns_beside_other_formats(tmp_path):
    """The rows of gate and up follow the order of down's columns."""
    ordered = test_gptq.make_with(order=test_gptq.shuffled, zero=7)
    tensors = tensors_of([test_fp8.per_row(()), dense, ordered])
    path = save(tmp_path / "a", tensors, test_gptq.config())
    fp8 = lambda p: p["weight"].double() * p["weight_scale"].double().reshape(-1, 1)  # noqa: E731
    check_formats(path, tensors, [fp8, dense_values, test_gptq.reference(1)], "MIXED")
    blocks = test_fp8.block("weight_scale_inv")
    path = save(tmp_path / "b", tensors_of([blocks, dense, ordered]), test_gptq.config())
    fails(
        path, "MIXED", "down_proj.g_idx", "gate is FP8 with scales per 128x128", hidden=H, inter=I
    )


# ---- partial groups ---------------------------------------------------------------------------


def partial(make, group):
    """A maker of groups of `group` columns, of which the last has fewer, from one of 32 each."""

    def made(rows, columns):
        parts = make(rows, columns)
        first = torch.arange(-(-columns // group)) * group // 32
        for name, dim in (("scales", 0), ("qzeros", 0), ("weight_scale", 1)):
            if name in parts:
                parts[name] = parts[name].index_select(dim, first)
        if "weight_zero_point" in parts:
            parts["weight_zero_point"] = parts["weight_zero_point"][:, first]
        if "g_idx" in parts:
            parts["g_idx"] = (parts["g_idx"].argsort().argsort() // group).int()
        return parts

    return made


def spread(reference, group):
    """The reference of whole groups of 32, of what `partial` made."""

    def values(parts):
        parts = dict(parts)
        columns = I if (parts.get("scales", torch.empty(0, 0)).shape[-1] == H) else H
        if "weight_scale" in parts:
            columns = I if len(parts["weight_scale"]) == H else H
        back = torch.arange(columns // 32) * 32 // group
        for name, dim in (("scales", 0), ("qzeros", 0), ("weight_scale", 1)):
            if name in parts:
                parts[name] = parts[name].index_select(dim, back)
        if "weight_zero_point" in parts:
            parts["weight_zero_point"] = parts["weight_zero_point"][:, back]
        if "g_idx" in parts:  # any order within a group stands for the same values
            order = parts["g_idx"].argsort(stable=True)
            parts["g_idx"] = torch.empty_like(parts["g_idx"])
            parts["g_idx"][order] = (torch.arange(columns) // 32).int()
        return reference(parts)

    return values


SHUFFLED = test_gptq.make_with(order=test_gptq.shuffled)
PARTIAL = {
    "GPTQ_INT4": (test_gptq.make_with(), test_gptq.reference(1), test_gptq.config(sym=False)),
    "GPTQ_INT4 with desc_act": (SHUFFLED, test_gptq.reference(1), test_gptq.config(sym=False)),
    "AWQ_INT4": (test_awq.make_with(), test_awq.reference, test_awq.config()),
    "RAWINT4": (test_int4.make_with(zero=True), test_int4.reference, test_int4.config()),
}


@pytest.mark.parametrize("group", [64, 128])
@pytest.mark.parametrize("kind", PARTIAL)
def test_a_partial_last_group(tmp_path, kind, group):
    """192 columns in groups of 128 and 64; 160 columns in groups of 64, 64 and 32."""
    make, reference, config = PARTIAL[kind]
    tensors = tensors_of([partial(make, group)] * 3)
    settings = dict(config, group_size=group)
    if kind == "RAWINT4":
        settings = test_int4.config(group_size=group, symmetric=False)
    path = save(tmp_path, tensors, settings)
    found = check_formats(path, tensors, [spread(reference, group)] * 3, kind.split()[0])
    assert found.down[0].scale.shape == (H, I // 32) and found.down[0].format == INT4_ZERO


@pytest.mark.parametrize(
    ("columns", "count", "given", "size"),
    [
        (192, 2, [], 96),
        (192, 2, [128], 128),
        (192, 2, [64], 96),  # it is of other matrices
        (2880, 23, [], 128),  # no other multiple of 32 fits
        (2880, 23, [-1, 128], 128),
        (4000, 3, [1600], 1600),
    ],
)
def test_sizes_of_groups(columns, count, given, size):
    info = TensorInfo("scales", "file", "F16", (1, count), 0, 2 * count)
    groups = groups_of(info, columns, count, given)
    assert (groups.size, groups.members().tolist()[-1]) == (size, columns - size * (count - 1))
    with pytest.raises(ValueError, match="'scales' has 3 groups; .* 4000 columns, or a group_size"):
        groups_of(info, 4000, 3, [])  # 1344 to 1984 fit


def test_groups_that_cannot_be_split(tmp_path):
    make = test_gptq.make_with(16, zero=7)
    path = save(tmp_path / "a", tensors_of([make] * 3), test_gptq.config(group_size=16))
    fails(path, "GPTQ_INT4", "a group has 16 columns", "multiples of 32", hidden=H, inter=I)
    tensors = tensors_of([test_gptq.make_with(zero=7)] * 3)
    name = next(n for n in tensors if n.endswith("0.gate_proj.scales"))
    tensors[name] = torch.cat([tensors[name], tensors[name]])[:11]
    path = save(tmp_path / "b", tensors, test_gptq.config())
    fails(path, "GPTQ_INT4", name, "11 groups", "192 columns", hidden=H, inter=I)


# ---- conversion -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "INT4_G32"])
@pytest.mark.parametrize("stored", [*CHECKPOINTS, *test_int8.GROUPS_OF_8])
def test_methods_that_quantise_convert(tmp_path, stored, method):
    make, config = CHECKPOINTS.get(stored) or test_int8.GROUPS_OF_8[stored][::2]
    path = save(tmp_path, tensors_of([make] * 3, inter=64), config)
    kept = read_experts(path, 0, E, H, 64)
    found = read_experts(path, 0, E, H, 64, method=method)
    for matrix in NAMES:
        values = getattr(found, matrix)[1]
        assert values.dtype == torch.float32
        assert torch.equal(values, values_of(getattr(kept, matrix)[1]).float())
    if not stored.startswith("MXFP"):  # which have values that no other format has
        load(path, method, inter=64)
