"""What method and checkpoint must agree on, and what config.json says against the files."""

import pytest
import test_awq
import test_fp8
import test_gptq
import test_int4
import test_mxfp4
import test_mxfp8
import test_nvfp4
import torch
from quantised_files import E, H, I, fails, make_experts, save
from safetensors.torch import save_file

from kt_kernel.checkpoint import open_checkpoint, read_experts
from kt_kernel.testing import values_of
from kt_kernel.utils.loader import BF16SafeTensorLoader, SafeTensorLoader
from kt_kernel.weights.methods import METHODS, get_method
from kt_kernel.weights.quantised import QuantisedMatrix, check_matrix

# By the method that takes it over: parts of a matrix, quantization_config.
CHECKPOINTS = {
    "FP8": (test_fp8.block("weight_scale_inv"), test_fp8.DEEPSEEK),
    "FP8_PERCHANNEL": (test_fp8.per_row(()), {"quant_method": "compressed-tensors"}),
    "RAWINT4": (test_int4.make_with(), test_int4.config()),
    "GPTQ_INT4": (test_gptq.make_with(), test_gptq.config(sym=False)),
    "AWQ_INT4": (test_awq.make_with(), test_awq.config()),
    "MXFP4": (test_mxfp4.compressed, {"quant_method": "compressed-tensors"}),
    "NVFP4": (test_nvfp4.MODELOPT, {"quant_method": "modelopt"}),
    "MXFP8": (test_mxfp8.make_with("weight_scale"), {"quant_method": "mxfp8"}),
}
QUANTISED = [name for name, method in METHODS.items() if method.quantised]


def dense(rows, columns):
    return {"weight": torch.randn(rows, columns).bfloat16()}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint for each method, and "dense"."""
    folders = {name: tmp_path_factory.mktemp(name) for name in [*CHECKPOINTS, "dense"]}
    for name, (make, quantization) in CHECKPOINTS.items():
        save(folders[name], make_experts(make), quantization)
    save(folders["dense"], make_experts(dense))
    return folders


def test_there_is_a_reader_for_every_method():
    # LLAMAFILE's files are GGUF, see test_gguf.py. MIXED reads all others, see below.
    assert set(QUANTISED) == {*CHECKPOINTS, "LLAMAFILE", "MIXED"}


@pytest.mark.parametrize("stored", CHECKPOINTS)
@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_with_every_checkpoint(checkpoints, stored, method):
    """Taken over by its own method and MIXED, converted by those that quantise; else both named."""
    path, chosen = checkpoints[stored], get_method(method)
    if method in (stored, "MIXED") or not chosen.quantised:
        found = read_experts(path, 0, E, H, I, method=method)
        assert isinstance(found.gate[0], QuantisedMatrix if chosen.quantised else torch.Tensor)
    elif chosen.mixed:
        fails(path, method, path, "safetensors", f"method {method} reads GGUF files")
    else:
        fails(
            path,
            method,
            path / "model.safetensors",
            f"{stored} reads; method {method} was",
        )


@pytest.mark.parametrize("stored", [*CHECKPOINTS, "dense"])
def test_forms_and_sizes(checkpoints, stored):
    checkpoint = open_checkpoint(checkpoints[stored])
    assert checkpoint.sizes(0) == (E, H, I)
    with checkpoint.each_expert(0, E, H, I, [2, 0]) as experts:
        form = experts.form
        found = list(experts)
    assert [number for number, _ in found] == [0, 2]
    if stored == "dense":
        assert form is None
        return
    formats = get_method(stored).formats
    for _, tensors in found:
        for matrix, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I))):
            assert check_matrix(matrix, tensors[matrix], formats, *shape) == getattr(form, matrix)


@pytest.mark.parametrize("method", CHECKPOINTS)
def test_methods_that_take_weights_over_need_quantised_ones(checkpoints, method):
    path = checkpoints["dense"]
    fails(path, method, path / "model.safetensors", "not quantised (BF16)", f"method {method}")


@pytest.mark.parametrize("name", ["a-quantiser-of-2030", "bitsandbytes", 7, ["fp8"]])
@pytest.mark.parametrize("stored", CHECKPOINTS)
def test_names_of_quantisers_decide_nothing(checkpoints, tmp_path, stored, name):
    """What a matrix holds is in its tensors. What only config.json shows is still read from it."""
    make, quantization = CHECKPOINTS[stored]
    path = save(tmp_path, make_experts(make), quantization | {"quant_method": name})
    found = read_experts(path, 0, E, H, I, method=stored)
    wanted = read_experts(checkpoints[stored], 0, E, H, I, method=stored)
    for matrix in ("gate", "up", "down"):
        assert torch.equal(
            values_of(getattr(found, matrix)[1]), values_of(getattr(wanted, matrix)[1])
        )


@pytest.mark.parametrize("stored", CHECKPOINTS)
def test_sizes_of_another_model(checkpoints, stored):
    expected = f"has {E} experts of hidden size {H} and intermediate size {I}; expected"
    fails(checkpoints[stored], stored, expected, hidden=2 * H, inter=2 * I)


@pytest.mark.parametrize("stored", ["FP8", "RAWINT4", "MXFP4"])
def test_an_expert_of_another_format(tmp_path, stored):
    """The first expert's format is that of the layer."""
    make, quantization = CHECKPOINTS[stored]
    tensors = make_experts(make)
    name = next(n for n in tensors if ".2.up_proj." in n and n.endswith(("weight", "packed")))
    tensors[name] = torch.zeros(tensors[name].shape, dtype=torch.bfloat16)
    fails(save(tmp_path, tensors, quantization), stored, name, "BF16")


def test_biases_beside_quantised_weights(tmp_path):
    make, quantization = CHECKPOINTS["FP8"]
    tensors = make_experts(lambda n, k: make(n, k) | {"bias": torch.randn(n).bfloat16()})
    found = read_experts(save(tmp_path, tensors, quantization), 0, E, H, I, method="FP8")
    name = "model.layers.0.mlp.experts.1.down_proj.bias"
    assert torch.equal(found.down_bias[1], tensors[name].float())
    tensors[name] = tensors[name][:-1]
    fails(save(tmp_path, tensors, quantization), "FP8", name, [H - 1], [H])


def test_two_files_and_a_duplicate(tmp_path):
    make, quantization = CHECKPOINTS["FP8"]
    tensors = make_experts(make)
    scales = {n: t for n, t in tensors.items() if n.endswith("scale_inv")}
    save(tmp_path, {n: t for n, t in tensors.items() if n not in scales}, quantization)
    save_file(scales, tmp_path / "scales.safetensors")
    whole = read_experts(tmp_path, 0, E, H, I, method="FP8")
    name = "model.layers.0.mlp.experts.1.up_proj"
    wanted = test_fp8.block_reference(
        {"weight": tensors[name + ".weight"], "scale": scales[name + ".weight_scale_inv"]}
    )
    assert torch.equal(values_of(whole.up[1]), wanted)
    save_file({name + ".weight": tensors[name + ".weight"]}, tmp_path / "again.safetensors")
    fails(tmp_path, "FP8", name + ".weight", "again.safetensors")


@pytest.mark.parametrize("stored", CHECKPOINTS)
def test_loader(checkpoints, stored):
    loader = SafeTensorLoader(checkpoints[stored])
    found = loader.load_experts("model.layers.0")
    whole = read_experts(checkpoints[stored], 0, E, H, I)
    for matrix in ("gate", "up", "down"):
        for e in range(E):
            quantised = getattr(whole, matrix)[e]
            assert torch.equal(
                found[matrix][e].view(torch.uint8), quantised.codes.view(torch.uint8)
            )
            assert torch.equal(found[f"{matrix}_scale"][e].float(), quantised.scale.float())
    with pytest.raises(ValueError, match="quantised"):
        BF16SafeTensorLoader(checkpoints[stored]).load_experts("model.layers.0")


def test_loader_has_no_place_for_an_order(tmp_path):
    make = test_gptq.make_with(order=test_gptq.shuffled)
    path = save(tmp_path, make_experts(make), test_gptq.config(sym=False))
    with pytest.raises(ValueError, match="gate are in an order .*kt_kernel.checkpoint"):
        SafeTensorLoader(path).load_experts("model.layers.0")
