"""W4AFP8 (RAWINT4), against its definition, code by code: two's complement, the lower column in the
low half of a byte, and one scale for a group of columns."""

import json

import pytest
import torch
from grid import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantised_files import (
    MOE,
    PROJECTIONS,
    W123,
    E,
    check_bad_parts,
    check_values,
    fails,
    load_layer,
    make_experts,
    parts_of,
    save,
    tensors_of,
)
from safetensors.torch import save_file

from kt_kernel.checkpoint import method_of, open_checkpoint, read_experts
from kt_kernel.weights.dequantise import dequantise
from kt_kernel.weights.formats import INT4_GROUP
from kt_kernel.weights.methods import METHODS
from kt_kernel.weights.quantised import QuantisedMatrix, check_matrix

H, I = 384, 256  # noqa: E741
SETTINGS = {"quant_method": "w4afp8"}


def make_with(group=128, dtype=torch.float32, scale="weight_scale_inv"):
    def make(rows, columns):
        code = torch.randint(-8, 8, (rows, columns)) & 15
        return {
            "weight": (code[:, 0::2] | code[:, 1::2] << 4).to(torch.uint8).view(torch.int8),
            scale: (torch.randn(rows, columns // group) * 1e-2).to(dtype),
        }

    return make


def reference(parts):
    (scale,) = (tensor.double() for name, tensor in parts.items() if name.startswith("weight_s"))
    rows, half = parts["weight"].shape
    values = torch.empty(rows, 2 * half, dtype=torch.double)
    for place in (0, 1):
        nibble = parts["weight"].long() // 16**place % 16  # rounds down, also below 0
        values[:, place::2] = torch.where(nibble < 8, nibble, nibble - 16).double()
    return values * scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale"])
def test_values(tmp_path, dtype, scale):
    tensors = make_experts(make_with(dtype=dtype, scale=scale), H, I)
    path = save(tmp_path, tensors, SETTINGS, "deepseek_v3")
    choice = method_of(open_checkpoint(path))
    assert (choice.method, choice.reason) == ("RAWINT4", "W4AFP8")
    found = check_values(path, tensors, "RAWINT4", reference, H, I)
    matrix = found.down[1]
    assert matrix.format == INT4_GROUP and matrix.scale.dtype == dtype
    form = check_matrix("down", matrix, METHODS["RAWINT4"].formats, H, I)
    assert form.group_size == 128


def test_every_byte(tmp_path):
    """Each pair of codes at once, with a scale of 1."""
    rows = torch.arange(256).to(torch.uint8).view(torch.int8)
    tensors = make_experts(
        lambda n, k: {"weight": rows.repeat(n, k // 512), "weight_scale_inv": torch.ones(n, 4)},
        512,
        512,
    )
    found = read_experts(save(tmp_path, tensors), 0, E, 512, 512, method="RAWINT4")
    pairs = dequantise(found.up[0])[0].reshape(256, 2).int().tolist()
    signed = [*range(8), *range(-8, 0)]
    assert pairs == [[signed[byte % 16], signed[byte // 16]] for byte in range(256)]


@settings(
    max_examples=examples(30),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    group=st.sampled_from([32, 64, 96, 128]),
    groups=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_shapes(tmp_path, group, groups, dtype):
    """With one group in a row, too, where the scales look like those of rows."""
    hidden, inter = (group * count for count in groups)
    tensors = make_experts(make_with(group, dtype), hidden, inter)
    path = save(tmp_path, tensors, SETTINGS)
    checkpoint = open_checkpoint(path)
    assert checkpoint.sizes(0) == (E, hidden, inter)
    assert method_of(checkpoint).method == "RAWINT4"
    check_values(path, tensors, "RAWINT4", reference, hidden, inter)


def test_a_layer(tmp_path):
    """Its output, with the values that the core packs from the file and gives back."""
    tensors = make_experts(make_with(), H, I)
    layer = load_layer(save(tmp_path, tensors, SETTINGS), "RAWINT4", H, I)
    x = torch.randn(E, H).bfloat16()
    found = layer.forward(x, torch.arange(E)[:, None], torch.ones(E, 1), None)
    for e in range(E):
        gate, up, down = (reference(parts_of(tensors, e, matrix)) for matrix in PROJECTIONS)
        token = x[e].double()
        wanted = down @ (torch.nn.functional.silu(gate @ token) * (up @ token))
        error = (found[e].double() - wanted).norm() / wanted.norm()
        assert error < 0.02, error


def published(tensors):
    """As the script of TensorRT-LLM leaves a model: the scales of activations have other names than
    the weights, and nothing about the experts is in config.json."""
    scales = {
        f"{MOE}.{e}.{name}.input_scale": torch.rand(1) for e in range(E) for name in W123.values()
    }
    return tensors | scales


def test_scales_of_activations_have_other_names(tmp_path):
    tensors = make_experts(make_with(), H, I)
    path = save(tmp_path, published(tensors), None, "deepseek_v3")
    check_values(path, tensors, "RAWINT4", reference, H, I)
    names = make_experts(make_with(), H, I, names=W123)
    mixed = {n: t for n, t in tensors.items() if ".2." not in n} | {
        n: t for n, t in names.items() if ".2." in n
    }
    fails(save(tmp_path / "mixed", mixed), "RAWINT4", "other naming scheme", hidden=H, inter=I)
    alone = {n: t for n, t in published(tensors).items() if n.endswith("input_scale")}
    with pytest.raises(ValueError, match=r"gate_proj.weight' is missing"):
        method_of(open_checkpoint(save(tmp_path / "alone", alone)))


def test_scales_of_activations_that_no_file_has(tmp_path):
    """The index of the script names a file of them that may be called otherwise."""
    tensors = make_experts(make_with(), H, I)
    save(tmp_path, {}, None, "deepseek_v3")
    save_file(tensors, tmp_path / "model.safetensors")
    listed = dict.fromkeys(published(tensors), "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    check_values(tmp_path, tensors, "RAWINT4", reference, H, I)


def test_methods_that_quantise_anew(tmp_path):
    tensors = make_experts(make_with(), H, I)
    path = save(tmp_path, tensors, SETTINGS)
    found = read_experts(path, 0, E, H, I, method="AMXINT8")
    assert not isinstance(found.up[1], QuantisedMatrix)
    wanted = reference(parts_of(tensors, 1, "up"))
    torch.testing.assert_close(found.up[1].double(), wanted, rtol=1e-6, atol=0)
    fails(path, "FP8", "W4AFP8", "method RAWINT4 reads", hidden=H, inter=I)


def test_beside_other_formats(tmp_path):
    """Bytes of one code and of two, told apart by the number of columns."""

    def bytes_of_one_code(rows, columns):
        codes = torch.randint(-128, 128, (rows, columns)).to(torch.int8)
        return {"weight": codes, "weight_scale_inv": torch.full((rows, columns // 128), 0.125)}

    makes = [make_with(), make_with(), bytes_of_one_code]
    path = save(tmp_path, tensors_of(makes, hidden=H, inter=I))
    choice = method_of(open_checkpoint(path))
    assert choice.method == "MIXED"
    assert choice.reason == "gate and up W4AFP8, down 8-bit integers with scales per group"


def test_bad_parts(tmp_path):
    tensors = make_experts(make_with(), H, I)
    bad = (float("nan"), float("inf"), float("-inf"))
    sizes = {"hidden": H, "inter": I}
    check_bad_parts(
        tmp_path / "s", tensors, "RAWINT4", SETTINGS, "weight_scale_inv", bad_values=bad, **sizes
    )
    check_bad_parts(tmp_path / "w", tensors, "RAWINT4", SETTINGS, "weight", **sizes)


def without_scales(parts):
    return {"weight": parts["weight"]}


def unsigned(parts):
    return parts | {"weight": parts["weight"].view(torch.uint8)}


def of_rows(parts):
    """[N]: neither one scale per group nor, with half as many bytes, one per row."""
    return parts | {"weight_scale_inv": parts["weight_scale_inv"][:, 0].contiguous()}


def along_rows(parts):
    """Packed along N, as an early version of the script did it."""
    rows, half = parts["weight"].shape
    return parts | {"weight": torch.zeros(rows // 2, 2 * half, dtype=torch.int8)}


def of_other_rows(parts):
    return parts | {"weight_scale_inv": torch.ones(7, parts["weight_scale_inv"].shape[1])}


def odd(parts):
    return parts | {"weight": parts["weight"][:, 1:]}


def groups(count):
    return lambda parts: parts | {"weight_scale_inv": torch.ones(len(parts["weight"]), count)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_scales, ("has dtype I8 and no scales", "expected BF16")),
        (unsigned, ("dtype U8", "I8 with float scales")),
        (of_rows, ("weight_scale_inv", "expected 2 dimensions")),
        (along_rows, ("weight_scale_inv", "accepted beside I8 weights")),
        (of_other_rows, ("weight_scale_inv", "accepted beside I8 weights")),
        (odd, ("gate_proj.weight'", "191 elements for 384 codes", "192 (4 bits) or 384 (8 bits)")),
        (groups(24), ("weight_scale_inv", "a group has 16 columns", "multiples of 32")),
        (groups(5), ("weight_scale_inv", "has 5 groups", "divides the 384 columns")),
        (lambda parts: parts | {"weight_zero_point": torch.ones(1)}, ("in no known format",)),
    ],
)
def test_what_is_not_in_the_format(tmp_path, change, words):
    tensors = make_experts(lambda *shape: change(make_with()(*shape)), H, I)
    path = save(tmp_path, tensors, SETTINGS)
    fails(path, "RAWINT4", f"{path}/model.safetensors", *words, hidden=H, inter=I)


def test_another_group_size_in_a_later_expert(tmp_path):
    tensors = make_experts(make_with(), H, I)
    name = f"{MOE}.2.down_proj.weight_scale_inv"
    tensors[name] = torch.ones(H, 4)
    path = save(tmp_path, tensors, SETTINGS)
    fails(path, "RAWINT4", name, "has shape [384, 4]", "expected [384, 2]", hidden=H, inter=I)


def test_another_model(tmp_path):
    path = save(tmp_path, make_experts(make_with(), H, I), SETTINGS)
    fails(path, "RAWINT4", "hidden size 384 and intermediate size 256", "768", hidden=768, inter=I)
