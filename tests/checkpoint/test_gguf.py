"""Experts of GGUF files: bit for bit what the gguf package says they are, and what is refused."""

import os
import re
import shutil
import struct

import numpy as np
import pytest
import torch
from gguf_models import ARCH, MATRICES, SUPPORTED, E, H, I, Model, values_of, write

from kt_kernel.checkpoint import open_checkpoint, read_experts
from kt_kernel.checkpoint.gguf import blocks as gguf_blocks
from kt_kernel.checkpoint.gguf.architectures import ARCHITECTURES, REFUSED
from kt_kernel.checkpoint.gguf.blocks import forms
from kt_kernel.checkpoint.safetensors.families import FAMILIES
from kt_kernel.testing import values_of as values_of_matrix
from kt_kernel.utils.loader import SafeTensorLoader
from kt_kernel.weights.formats import BF16, INT4_GROUP, MXFP4, LayerForm
from kt_kernel.weights.quantised import QuantisedMatrix, check_matrix

SIZES = (E, H, I)
METHOD = "LLAMAFILE"
SHAPES = {"gate": (I, H), "up": (I, H), "down": (H, I)}


def fails(path, *words, error=ValueError, method=METHOD, sizes=SIZES):
    with pytest.raises(error) as caught:
        read_experts(path, 0, *sizes, method=method)
    for word in words:
        assert str(word) in str(caught.value), str(caught.value)


def check(path, model, layer=0, method=METHOD, **options):
    """All experts stand for what the package says, exactly. Returns them."""
    sizes = (model.experts, model.hidden, model.inter)
    checkpoint = open_checkpoint(path)
    assert checkpoint.sizes(layer) == sizes
    found = checkpoint.read_experts(layer, *sizes, method=method, **options)
    for matrix in MATRICES:
        wanted = model.values(layer, matrix)
        for expert, given in enumerate(getattr(found, matrix)):
            if given is None:
                continue
            values = values_of_given(model.kind[matrix], given)
            assert np.array_equal(values, wanted[expert]), (matrix, expert)
    return found


def values_of_given(kind, given):
    """float32, by the package where the blocks are ggml's own."""
    if isinstance(given, torch.Tensor):
        return given.float().numpy()
    if given.format.ggml:
        assert given.format.name == kind
        return values_of(kind, given.codes.numpy())
    return values_of_matrix(given).float().numpy()


# --- what is read


@pytest.mark.parametrize("kind", SUPPORTED)
def test_every_type(tmp_path, kind):
    model = Model((kind,) * 3)
    found = check(model.save(tmp_path / "m.gguf"), model)
    for matrix in MATRICES:
        for given in getattr(found, matrix):
            if isinstance(given, torch.Tensor):
                assert given.shape == SHAPES[matrix] and given.is_contiguous()
                assert forms()[kind].format == BF16
            else:
                formats = (given.format,)
                assert check_matrix("m", given, formats, *SHAPES[matrix]) == forms()[kind]


def test_all_codes_and_scales(tmp_path):
    """Bytes of every value, negative scales, scales that are subnormal and 0."""
    rng = np.random.default_rng(1)
    numbers = np.array([0, -0.0, 2**-24, -(2**-15), 65504, -65504, 1, -0.3], np.float16)
    rows = rng.integers(0, 256, (E, I, H // 32, 18), dtype=np.uint8)
    rows[..., :2] = rng.choice(numbers, (E, I, H // 32, 1)).view(np.uint8)
    mx = rng.integers(0, 256, (E, H, I // 32, 17), dtype=np.uint8)
    mx[..., 0] = rng.choice(np.array([0, 1, 2, 127, 253, 254], np.uint8), mx.shape[:-1])
    model = Model(("Q4_0", "Q4_0", "MXFP4"))
    model.rows[0, "gate"] = rows.reshape(E, I, -1)
    model.rows[0, "down"] = mx.reshape(E, H, -1)
    with np.errstate(over="ignore"):  # 12 * 2^126, which the kernels' scale of 2^127 does not reach
        found = check(model.save(tmp_path / "m.gguf"), model)
    assert (found.gate[0].format, found.down[0].format) == (INT4_GROUP, MXFP4)


@pytest.mark.parametrize("kind", ["Q4_0", "MXFP4"])
def test_nibbles_of_more_than_is_moved_at_a_time(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(gguf_blocks, "_AT_A_TIME", 1000)  # a number of rows that divides neither
    model = Model((kind,) * 3)
    check(model.save(tmp_path / "m.gguf"), model)


MIXED = [
    ("Q4_K", "Q4_K", "Q6_K"),
    ("Q2_K", "IQ4_XS", "Q3_K"),
    ("BF16", "Q8_0", "F16"),
    ("Q4_0", "MXFP4", "Q5_1"),
    ("F32", "F16", "BF16"),
]


@pytest.mark.parametrize("kinds", MIXED)
@pytest.mark.parametrize("naming, biases", [("stacked", True), ("each", False), ("each", True)])
def test_types_and_names(tmp_path, kinds, naming, biases):
    model = Model(kinds, naming=naming, biases=biases, layers=(0, 7))
    path = model.save(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    assert checkpoint.layers() == [0, 7] and checkpoint.where(7) == "blk.7."
    for layer in (0, 7):
        found = check(path, model, layer)
        for matrix in MATRICES:
            given = getattr(found, f"{matrix}_bias")
            assert (given is not None) == biases
            for bias, wanted in zip(given or [], model.bias[layer, matrix], strict=False):
                assert bias.dtype == torch.float32 and np.array_equal(bias.numpy(), wanted)


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "MXFP4", "F32"])
@pytest.mark.parametrize("biases", [False, True])
def test_gate_and_up_in_one(tmp_path, kind, biases):
    model = Model((kind, kind, "Q5_0"), naming="fused", biases=biases)
    found = check(model.save(tmp_path / "m.gguf"), model)
    if biases:
        assert np.array_equal(found.gate_bias[2].numpy(), model.bias[0, "gate"][2])
        assert np.array_equal(found.up_bias[1].numpy(), model.bias[0, "up"][1])
        assert np.array_equal(found.down_bias[0].numpy(), model.bias[0, "down"][0])


def test_biases_of_other_types(tmp_path):
    model = Model(biases=True)
    tensors = model.tensors()
    name = "blk.0.ffn_up_exps.bias"
    tensors[name] = "F16", tensors[name][1].astype(np.float16)
    path = write(tmp_path / "m.gguf", tensors, {})
    found = read_experts(path, 0, *SIZES)
    assert np.array_equal(found.up_bias[1].numpy(), tensors[name][1][1].astype(np.float32))
    tensors[name] = "Q8_0", model.rows[0, "gate"][0][:E, : I // 32 * 34]
    fails(write(tmp_path / "q.gguf", tensors, {}), name, "Q8_0", "bias")


@pytest.mark.parametrize("alignment", [1, 2, 8, 4096])
@pytest.mark.parametrize("kinds", [("F32", "F16", "BF16"), ("Q4_0", "MXFP4", "Q4_1")])
def test_alignment(tmp_path, alignment, kinds):
    model = Model(kinds, arch=ARCH + "x" * (alignment < 8), metadata={"odd": 1})
    check(model.save(tmp_path / "m.gguf", alignment=alignment), model)


@pytest.mark.parametrize("shape", [(1, 32, 32), (2, 32, 96), (5, 288, 64), (1, 256, 512)])
def test_sizes(tmp_path, shape):
    experts, hidden, inter = shape
    for naming in ("stacked", "fused", "each"):
        model = Model(("Q8_0", "Q8_0", "MXFP4"), experts, hidden, inter, naming=naming, biases=True)
        check(model.save(tmp_path / f"{naming}.gguf"), model)


def test_a_stack_of_one_without_its_dimension(tmp_path):
    """ggml leaves out dimensions of 1 at the outer end when it writes a tensor again."""
    model = Model(experts=1, biases=True)
    tensors = {
        name: (kind, rows[0]) for name, (kind, rows) in model.tensors().items() if rows.ndim > 1
    }
    found = check(write(tmp_path / "m.gguf", tensors, {}), model)
    assert found.gate_bias[0].shape == (I,)


def test_some_experts(tmp_path):
    model = Model(experts=5)
    found = check(model.save(tmp_path / "m.gguf"), model, experts=[3, 1])
    assert [e is not None for e in found.up] == [False, True, False, True, False]
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    with checkpoint.each_expert(0, 5, H, I, [4, 0], METHOD) as experts:
        assert experts.form == LayerForm(forms()["Q4_K"], forms()["Q4_K"], forms()["Q6_K"])
        assert [number for number, _ in experts] == [0, 4]


@pytest.mark.parametrize("size", [100, None])
def test_a_file_that_changes_while_it_is_read(tmp_path, size):
    path = Model().save(tmp_path / "m.gguf")
    with open_checkpoint(path).each_expert(0, E, H, I, [0]) as experts:
        list(experts)
        os.truncate(path, size) if size else os.utime(path, (1, 1))
        with pytest.raises(ValueError, match="m.gguf: changed since"):
            next(iter(experts))


def test_tensors_by_name(tmp_path):
    model = Model(("Q4_K", "BF16", "F16"))
    checkpoint = open_checkpoint(model.save(tmp_path / "m.gguf"))
    for matrix, dtype in zip(MATRICES, (torch.uint8, torch.bfloat16, torch.float16), strict=True):
        found = checkpoint.read_tensor(f"blk.0.ffn_{matrix}_exps.weight")
        assert found.dtype == dtype
        raw = found.contiguous().view(torch.uint8).numpy()
        assert np.array_equal(raw, model.rows[0, matrix].view(np.uint8))
    assert torch.equal(checkpoint.read_tensor("output_norm.weight"), torch.ones(8))
    for number, shape in enumerate([(4, 0, 8), (8, 0), (0,)]):
        empty = write(tmp_path / f"{number}.gguf", {"t": ("F32", np.zeros(shape, "f"))}, {})
        assert open_checkpoint(empty).read_tensor("t").shape == shape
    with pytest.raises(KeyError, match="no tensor 'x'"):
        checkpoint.read_tensor("x")


def test_old_names_of_the_loaders(tmp_path):
    model = Model(("Q4_K", "MXFP4", "BF16"), biases=True)
    loader = SafeTensorLoader(model.save(tmp_path / "m.gguf"))
    assert loader.has_tensor("blk.0.ffn_up_exps.weight")
    found = loader.load_experts("blk.0")
    assert np.array_equal(found["gate"][1].numpy(), model.rows[0, "gate"][1])
    assert found["gate_scale"] is None and found["down_scale"] is None
    assert found["up_scale"][2].shape == (I, H // 32)
    assert found["down"][0].dtype == torch.bfloat16 and found["up_bias"][0].shape == (I,)
    with pytest.raises(ValueError, match="found them at 'blk.0.'"):
        loader.load_experts("model.layers.0")


# --- methods


@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "INT4_G32"])
def test_methods_that_quantise_take_dense_tensors(tmp_path, method):
    model = Model(("F32", "F16", "BF16"))
    path = model.save(tmp_path / "m.gguf")
    with open_checkpoint(path).each_expert(0, *SIZES, method=method) as experts:
        assert experts.form is None
    check(path, model, method=method)


@pytest.mark.parametrize("method", ["BF16", "AMXINT4", "RAWINT4", "FP8", "MXFP4", "GPTQ_INT4"])
def test_other_methods_are_refused_with_the_one_that_fits(tmp_path, method):
    path = Model(("BF16", "BF16", "Q4_0")).save(tmp_path / "m.gguf")
    dense = method in ("BF16", "AMXINT4")
    name = "blk.0.ffn_down_exps.weight" if dense else "blk.0.ffn_gate_exps.weight"
    fails(path, path, name, "LLAMAFILE", f"method {method} was requested", method=method)


def test_mxfp4_for_its_own_method(tmp_path):
    model = Model(("MXFP4",) * 3, biases=True, arch="gpt-oss")
    found = check(model.save(tmp_path / "m.gguf"), model, method="MXFP4")
    assert found.down[0].format == MXFP4


# --- what is refused


def test_a_type_of_a_fork(tmp_path):
    """Type 141 is one of ik_llama.cpp. It matters only where it is needed."""
    for name, error in (("output_norm.weight", None), ("blk.0.ffn_up_exps.weight", "number 141")):
        path = Model().save(tmp_path / f"{name}.gguf")
        content = bytearray(path.read_bytes())
        begin = content.find(name.encode()) + len(name)
        (rank,) = struct.unpack_from("<I", content, begin)
        struct.pack_into("<I", content, begin + 4 + 8 * rank, 141)
        path.write_bytes(content)
        if error:
            fails(path, path, name, f"is of type {error}", "supported: F32")
        else:
            read_experts(path, 0, *SIZES, method=METHOD)
        with pytest.raises(ValueError, match=f"{name}' is of ggml type number 141; known: F32"):
            open_checkpoint(path).read_tensor(name)


def test_types_without_kernels(tmp_path):
    for kind, size in [("IQ1_S", 50), ("IQ2_XXS", 66), ("IQ3_S", 110), ("TQ1_0", 54), ("I8", 256)]:
        tensors = Model().tensors()
        name = "blk.0.ffn_up_exps.weight"
        tensors[name] = kind, np.zeros((E, I, H // 256 * size), np.uint8)
        path = write(tmp_path / f"{kind}.gguf", tensors, {})
        fails(path, path, name, f"is of type {kind}", "supported: F32")


@pytest.mark.parametrize(
    "kind, place",
    [
        ("Q4_0", 0),
        ("Q4_1", 2),
        ("Q5_0", 0),
        ("Q5_1", 2),
        ("Q8_0", 0),
        ("Q2_K", 80),
        ("Q2_K", 82),
        ("Q3_K", 108),
        ("Q4_K", 0),
        ("Q4_K", 2),
        ("Q5_K", 2),
        ("Q6_K", 208),
        ("IQ4_NL", 0),
        ("IQ4_XS", 0),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite(tmp_path, kind, place, value):
    model = Model(("Q8_0", kind, "Q8_0"))
    rows = model.rows[0, "up"]
    row_bytes = rows.shape[-1]
    blocks = H // (256 if kind.endswith(("_K", "XS")) else 32)
    begin = row_bytes // blocks + place
    rows[2, 5, begin : begin + 2] = np.array([value], np.float16).view(np.uint8)
    path = model.save(tmp_path / "m.gguf")
    fails(path, path, "blk.0.ffn_up_exps.weight", "expert 2", "row 5, block 1", f"byte {place}")


def test_mxfp4_scale_of_nan(tmp_path):
    model = Model(("MXFP4",) * 3)
    model.rows[0, "down"][1, 4, 17] = 255
    fails(model.save(tmp_path / "m.gguf"), "ffn_down_exps", "expert 1", "row 4, block 1", "255")


@pytest.mark.parametrize("naming", ["stacked", "fused", "each"])
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_missing_tensors(tmp_path, naming, part):
    model = Model(("Q8_0",) * 3, biases=True, naming=naming)
    names = [name for name in model.tensors() if name.startswith("blk") and name.endswith(part)]
    for number, name in enumerate(names):
        path = model.save(tmp_path / f"{number}.gguf", drop=(name,))
        expected = "ffn_gate_exps" if "gate_up" in name else name
        fails(path, path, expected, "missing")


def test_other_parts(tmp_path):
    for part in ("scale", "input_scale", "weight.lora_a"):
        tensors = Model().tensors()
        name = f"blk.0.ffn_down_exps.{part}"
        tensors[name] = "F32", np.ones(E, "f")
        path = write(tmp_path / f"{part}.gguf", tensors, {})
        fails(path, path, name, "not supported", "weight, bias")


def test_experts_in_two_ways(tmp_path):
    tensors = Model(naming="each").tensors() | Model().tensors()
    fails(write(tmp_path / "a.gguf", tensors, {}), "ffn_gate_exps", "one by one")
    both = Model(("Q8_0",) * 3).tensors() | Model(("Q8_0",) * 3, naming="fused").tensors()
    fails(write(tmp_path / "b.gguf", both, {}), "ffn_gate_up_exps", "half of it")


def test_experts_of_different_types_or_shapes(tmp_path):
    name = "blk.0.ffn_up.1.weight"
    for number, other in enumerate((("Q8_0", "Q8_0", "Q4_K"), ("Q4_K", "Q6_K", "Q4_K"))):
        tensors = Model(naming="each").tensors() | {
            name: Model(other, naming="each").tensors()[name]
        }
        path = write(tmp_path / f"{number}.gguf", tensors, {})
        fails(path, path, name, "is Q", "as 'blk.0.ffn_up.0.weight'")


@pytest.mark.parametrize("naming", ["stacked", "fused", "each"])
@pytest.mark.parametrize("sizes", [(E + 1, H, I), (E - 1, H, I), (E, H // 2, I), (E, H, 2 * I)])
def test_other_sizes(tmp_path, naming, sizes):
    path = Model(naming=naming, kinds=("Q8_0",) * 3).save(tmp_path / "m.gguf")
    text = "{} experts of hidden size {} and intermediate size {}".format
    fails(path, path, "blk.0.ffn", text(*SIZES), text(*sizes), sizes=sizes)


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("shape", [(E, I), (E, 2, I, H), (H,), (E, H, I, 1)])
def test_other_shapes(tmp_path, matrix, shape):
    tensors = Model().tensors()
    name = f"blk.0.ffn_{matrix}_exps.weight"
    tensors[name] = "F32", np.zeros(shape, "f")
    fails(write(tmp_path / "m.gguf", tensors, {}), name, list(shape))


@pytest.mark.parametrize("key", ["expert_count", "embedding_length", "expert_feed_forward_length"])
def test_keys_that_say_otherwise(tmp_path, key):
    path = Model(metadata={key: 4096}).save(tmp_path / "m.gguf")
    fails(path, path, f"'{ARCH}.{key}' is 4096")
    per_layer = Model(metadata={key: [1, 2, 3]})
    check(per_layer.save(tmp_path / "list.gguf"), per_layer)


def test_layers_without_experts(tmp_path):
    path = Model(layers=(2, 3)).save(tmp_path / "m.gguf")
    fails(path, path, "layer 0 has no experts; layers with experts: 2-3")
    path = write(tmp_path / "dense.gguf", {"blk.0.ffn_gate.weight": ("F32", np.ones(8, "f"))}, {})
    fails(path, path, "no layer has experts")


def test_changed_after_opening(tmp_path):
    model = Model()
    path = model.save(tmp_path / "m.gguf")
    checkpoint = open_checkpoint(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-4096])
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: changed"):
        checkpoint.read_experts(0, *SIZES)
    fails(path, path, "ffn_down_exps", "truncated")
    path.write_bytes(whole)
    check(path, model)


def test_safetensors_for_llamafile(tmp_path):
    from quantised_files import make_experts, save

    path = save(tmp_path, make_experts(lambda *shape: {"weight": torch.randn(shape)}))
    fails(path, path, "LLAMAFILE reads GGUF files")


# --- architectures


def test_architectures_are_those_of_the_package():
    from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSOR, MODEL_TENSORS

    experts = {MODEL_TENSOR.FFN_DOWN_EXP}
    names = {MODEL_ARCH_NAMES[arch] for arch, t in MODEL_TENSORS.items() if experts & set(t)}
    assert set(ARCHITECTURES) | set(REFUSED) <= names


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_known_architectures(tmp_path, arch):
    model = Model(("Q8_0",) * 3, 2, 32, 32, arch=arch)
    path = model.save(tmp_path / "m.gguf")
    check(path, model)
    assert open_checkpoint(path).model_type == ARCHITECTURES[arch]


def test_model_types_with_a_family():
    """Most have one; the others are models that transformers does not know as such."""
    assert len(set(ARCHITECTURES.values()) & set(FAMILIES)) >= 22


def test_unknown_architecture(tmp_path):
    model = Model(arch="new-moe")
    path = model.save(tmp_path / "m.gguf")
    check(path, model)
    assert open_checkpoint(path).model_type is None


@pytest.mark.parametrize("arch", REFUSED)
def test_refused_architectures(tmp_path, arch):
    path = Model(arch=arch).save(tmp_path / "m.gguf")
    fails(path, path, f"architecture '{arch}' is not supported", REFUSED[arch])


def test_behind_another_name(tmp_path):
    model = Model()
    path = model.save(tmp_path / "m.gguf")
    shutil.move(path, tmp_path / "blob")
    check(tmp_path / "blob", model)
    assert isinstance(read_experts(tmp_path / "blob", 0, *SIZES).up[0], QuantisedMatrix)
