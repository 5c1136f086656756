"""The method that is chosen for a checkpoint, for each kind of checkpoint that is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf_models import ARCH, Model
from gguf_models import write as write_gguf
from quantised_files import make_experts, save
from safetensors.torch import load_file, save_file
from samples import samples
from test_methods import CHECKPOINTS

from kt_kernel.checkpoint import open_checkpoint
from kt_kernel.checkpoint.method import Choice, method_of
from kt_kernel.conversion import Request, convert, make_plan
from kt_kernel.weights.store.manifest import MANIFEST
from kt_kernel.weights.store.quant_methods import QUANT_METHODS

SAMPLES = samples()
DATA = Path(__file__).parent / "data"


def chosen(path: Path, *layers: int) -> Choice:
    return method_of(open_checkpoint(path), layers or None)


def write(folder: Path, name: str, layer: int = 0) -> Path:
    """A sample's experts as those of a layer, added to what the folder holds."""
    sample = SAMPLES[name]
    tensors = {n.replace("layers.0.", f"layers.{layer}."): t for n, t in sample.tensors.items()}
    file = folder / "model.safetensors"
    if file.exists():
        tensors |= load_file(file)
    return save(folder, tensors, sample.quantization, sample.model_type)


@pytest.mark.parametrize("name", SAMPLES)
def test_safetensors(tmp_path: Path, name: str) -> None:
    """What is quantised is kept; 16-bit weights are quantised in groups."""
    wanted = SAMPLES[name].method
    found = chosen(write(tmp_path, name))
    assert found.method == ("INT4_G32" if wanted == "BF16" else wanted)
    assert found.reason and "\n" not in found.reason


def test_there_is_a_sample_for_every_method() -> None:
    assert {*CHECKPOINTS, "BF16", "AMXINT8", "MIXED"} == {
        sample.method for sample in SAMPLES.values()
    }


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_unquantised(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in SAMPLES["dense"].tensors.items()}
    assert chosen(save(tmp_path, tensors)) == Choice("INT4_G32", "16- or 32-bit weights")


@pytest.mark.parametrize("quant", QUANT_METHODS)
def test_packed_directories(tmp_path: Path, quant: str) -> None:
    method = QUANT_METHODS[quant]
    matrices = make_experts(lambda *shape: {"weight": torch.ones(shape)}, 128, 128)
    source = save(tmp_path / "source", matrices)
    convert(make_plan(Request(str(source), str(tmp_path / "packed"), method)))
    assert chosen(tmp_path / "packed") == Choice(method, "a packed directory")
    manifest = tmp_path / "packed" / MANIFEST
    manifest.write_text(manifest.read_text().replace(f'"{method}"', '"INT3_ROW"'))
    with pytest.raises(ValueError, match="packed: packed for unknown method 'INT3_ROW'"):
        chosen(tmp_path / "packed")


@pytest.mark.parametrize(
    ("folder", "method"),
    [("int8-1-128x64", "AMXINT8"), ("int4-2-128x256", "AMXINT4"), ("kt_folder", "AMXINT8")],
)
def test_directories_of_kt_kernel(folder: str, method: str) -> None:
    assert chosen(DATA / folder).method == method


@pytest.mark.parametrize(
    ("kinds", "method"),
    [
        (("Q4_K", "Q4_K", "Q6_K"), "LLAMAFILE"),
        (("Q8_0", "F16", "BF16"), "LLAMAFILE"),
        (("F16", "F32", "BF16"), "INT4_G32"),
    ],
)
def test_gguf(tmp_path: Path, kinds: tuple[str, str, str], method: str) -> None:
    model = Model(kinds, hidden=256, inter=256, layers=(0, 2))
    assert chosen(model.save(tmp_path / "model.gguf")).method == method


def test_gguf_with_unquantised_layers(tmp_path: Path) -> None:
    """LLAMAFILE takes both."""
    dense, quantised = (
        Model((kind,) * 3, hidden=64, inter=64, layers=(layer,))
        for layer, kind in enumerate(["F16", "Q8_0"])
    )
    metadata = {f"{ARCH}.{key}": value for key, value in dense.metadata.items()}
    path = write_gguf(tmp_path / "m.gguf", dense.tensors() | quantised.tensors(), metadata)
    assert chosen(path) == Choice("LLAMAFILE", "16- or 32-bit weights in layer 0; GGUF in layer 1")


def test_layers_that_differ(tmp_path: Path) -> None:
    """What was found where, in one line. More of this is in test_mixed_formats.py."""
    for layer, name in enumerate(["dense", "FP8", "FP8"]):
        write(tmp_path, name, layer)
    assert chosen(tmp_path) == Choice(
        "FP8",
        "16- or 32-bit weights in layer 0; FP8 with scales per 128x128 block in layers 1-2",
    )
    assert chosen(tmp_path, 1, 2) == Choice("FP8", "FP8 with scales per 128x128 block")
    write(tmp_path, "NVFP4", 3)
    assert chosen(tmp_path).method == "MIXED"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e5m2])
def test_weights_of_an_unknown_kind(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in SAMPLES["dense"].tensors.items()}
    with pytest.raises(ValueError, match=r"tensor '.*' has dtype .* no scales; accepted") as caught:
        chosen(save(tmp_path, tensors))
    message = str(caught.value)
    assert "\n" not in message
    assert all(method in message for method in (*CHECKPOINTS, "BF16"))


def test_scales_of_an_unknown_kind(tmp_path: Path) -> None:
    tensors = dict(SAMPLES["dense"].tensors)
    tensors |= {name + "_scale": torch.ones(3, 5) for name in tensors}
    with pytest.raises(ValueError, match="expected F8_E4M3 with scales"):
        chosen(save(tmp_path, tensors))


def test_no_layer_that_counts(tmp_path: Path) -> None:
    write(tmp_path, "dense", 4)
    with pytest.raises(ValueError, match="no layer of the model has experts .*: 4$"):
        chosen(tmp_path, 0, 1)
    save_file({"lm_head.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="layers with experts: none"):
        chosen(tmp_path)


def test_a_name_alone_decides_nothing(tmp_path: Path) -> None:
    """config.json says FP8 of a model whose experts are not quantised, as some do."""
    save(tmp_path, SAMPLES["dense"].tensors, {"quant_method": "fp8"})
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert chosen(tmp_path).method == "INT4_G32"
