"""Packed directories that are not as they should be."""

import copy
import json
import os
import shutil
import struct

import numpy as np
import pytest
import torch
from grid import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packed_cases import E, H, I, contents, forward, loaded, run_convert, save_checkpoint, wrapper

from kt_kernel.checkpoint import open_checkpoint, read_experts
from kt_kernel.runtime.variant import native
from kt_kernel.serving.option_table import OptionError
from kt_kernel.serving.options import KTOptions
from kt_kernel.serving.preflight import ServedModel, prepare
from kt_kernel.utils.loader import SafeTensorLoader
from kt_kernel.weights.store.manifest import VERSION, read_manifest


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    source = save_checkpoint(folder / "source")
    return run_convert(source, folder / "out")


@pytest.fixture
def packed(good, tmp_path):
    return shutil.copytree(good, tmp_path / "packed")


def change(folder, edit):
    path = folder / "kt_manifest.json"
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def fails(folder, *words, error=ValueError, method="AMXINT8", layer=2):
    with pytest.raises(error) as caught:
        loaded(layer, method, folder)
    for word in words:
        assert str(word) in str(caught.value), str(caught.value)


def test_round_trip(good):
    manifest = read_manifest(str(good))
    assert manifest.to_json() == (good / "kt_manifest.json").read_text()
    assert not manifest.missing and manifest.expected == (1, 2)


def test_given_as_a_file(good):
    assert open_checkpoint(good / "kt_manifest.json").layers() == [1, 2]
    with pytest.raises(
        ValueError, match="layer-00001.*this file belongs to a packed directory; give the"
    ):
        open_checkpoint(good / "layer-00001.safetensors")


def test_another_method(good):
    fails(good, good, "packed for method AMXINT8, but method INT4_G32", method="INT4_G32")
    fails(good, "packed for method AMXINT8, but method FP8 was requested", method="FP8")


def test_other_sizes(good):
    for option, value in (("num_experts", 4), ("hidden_size", 64), ("moe_intermediate_size", 64)):
        layer = wrapper(2, "AMXINT8", good, **{option: value})
        with pytest.raises(ValueError) as caught:
            layer.load_weights(torch.arange(4 if option == "num_experts" else E))
        for word in ("layer-00002", f"has {E} experts of hidden size {H} and", f" {value}"):
            assert word in str(caught.value)
    fails(good, "layer 7 has no experts; layers with experts: 1-2", layer=7)


@pytest.mark.parametrize("key", ["version", "layout_version"])
@pytest.mark.parametrize("value", [99, 0, None, "1", True])
def test_another_version_is_refused_with_the_command(packed, key, value):
    change(packed, lambda content: content.update({key: value}))
    command = f"kt quant --input-path CHECKPOINT --output {packed} --quant-method int8"
    mine = {"version": VERSION, "layout_version": native().layout_version}[key]
    fails(packed, "kt_manifest.json", f"{key} is {value!r}; this kt-moe reads {mine}", command)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c.pop("method"), ["lacks 'method'"]),
        (lambda c: c.update(more=1), ["has 'more'"]),
        (lambda c: c.update(hidden_size=0), ["hidden_size is 0"]),
        (lambda c: c.update(hidden_size=64), ["layer 1: bytes is", "expected"]),
        (lambda c: c.update(method="AMXINT9"), ["packed for unknown method 'AMXINT9'"]),
        (lambda c: c.update(method="AMXINT4"), ["packed for method AMXINT4"]),
        (lambda c: c.update(source="x"), ["source is 'x'"]),
        (lambda c: c.update(expected_layers=[2, 1]), ["expected_layers"]),
        (lambda c: c.update(expected_layers=[1]), ["layer 2 is not in expected_layers"]),
        (lambda c: c.update(layers=[]), ["layers must be an object"]),
        (lambda c: c["layers"].update({"02": c["layers"]["2"]}), ["'02' in layers"]),
        (lambda c: c["layers"].update({"-1": c["layers"]["2"]}), ["'-1' in layers"]),
        (lambda c: c["layers"].update({"9" * 5000: c["layers"]["2"]}), ["kt_manifest.json: '999"]),
        (lambda c: c["layers"].pop("2"), ["layer 2 is missing", "--resume"]),
        (lambda c: c["layers"]["2"].update(file="../x"), ["file is '../x'"]),
        (lambda c: c["layers"]["2"].update(bytes=1), ["layer 2: bytes is 1; expected"]),
        (lambda c: c["layers"]["2"].update(num_experts=4), ["layer 2: bytes is", "expected"]),
        (lambda c: c["layers"]["2"].update(num_experts=10**9), ["num_experts is 1000000000"]),
        (lambda c: c["layers"]["2"].update(sha256="0"), ["sha256 is '0'"]),
        (lambda c: c["layers"]["2"].update(biases=["bias"]), ["biases is ['bias']"]),
        (lambda c: c["layers"]["2"]["forms"].pop("up"), ["forms lacks 'up'"]),
        (lambda c: c["layers"]["2"]["forms"]["up"].update(format=99), ["not a weight form"]),
        (lambda c: c["layers"]["2"]["forms"]["up"].update(group_size=32), ["not a weight form"]),
        (lambda c: c.update(model_type="other"), ["layer-00002", "header does not match"]),
    ],
)
def test_manifests_that_are_wrong(packed, edit, words):
    change(packed, edit)
    fails(packed, *words)


def test_a_manifest_that_is_a_pipe(packed):
    (packed / "kt_manifest.json").unlink()
    os.mkfifo(packed / "kt_manifest.json")
    fails(packed, "kt_manifest.json: not a file")


def test_a_form_that_the_method_does_not_make(packed):
    """All consistent, but int8 tiles named BF16 would be read far past their end."""

    def edit(content):
        for layer in content["layers"].values():
            for form in layer["forms"].values():
                form["format"] = 0
            layer["bytes"] = 0

    change(packed, edit)
    fails(packed, "bytes is 0; expected")

    def lie(content):
        for layer in content["layers"].values():
            layer["bytes"] = int(text.split("expected ")[1])

    with pytest.raises(ValueError) as caught:
        open_checkpoint(packed)
    text = str(caught.value)
    change(packed, lie)
    fails(packed, "layer-00001", "bytes, but")  # the file's size is another
    for file in packed.glob("layer*"):
        os.truncate(file, int(text.split("expected ")[1]))
    fails(packed, "layer 2 is BF16, which method AMXINT8 does not produce")


def test_files_that_are_wrong(packed, good):
    second = packed / "layer-00002.safetensors"
    data = second.read_bytes()
    second.unlink()
    fails(packed, second, "missing, but")
    second.write_bytes(data[:-1])
    fails(packed, second, f"{len(data) - 1} bytes, but", len(data))
    second.write_bytes((good / "layer-00001.safetensors").read_bytes())
    fails(packed, second, "its header does not match kt_manifest.json")
    second.write_bytes(b"\0" * len(data))
    fails(packed, second, "header is not valid JSON")
    second.write_bytes(struct.pack("<Q", 1 << 60) + data[8:])
    fails(packed, second, "header length")
    second.write_bytes(data)
    loaded(2, "AMXINT8", packed)
    (packed / "kt_manifest.json").unlink()
    fails(packed, "layer-00001", "this file belongs to a packed directory; give the folder")


def test_a_layer_of_a_model_of_the_same_sizes(packed, tmp_path):
    other = run_convert(save_checkpoint(tmp_path / "source", seed=5), tmp_path / "other")
    shutil.copy(other / "layer-00002.safetensors", packed / "layer-00002.safetensors")
    fails(packed, "layer-00002", "the file is damaged or of another model")


def test_a_file_that_changes_after_it_was_opened(packed):
    checkpoint = open_checkpoint(packed)
    os.truncate(packed / "layer-00002.safetensors", 100)
    with pytest.raises(ValueError, match="layer-00002.*changed since"):
        checkpoint.read_experts(2, E, H, I)
    with pytest.raises(ValueError, match="100 bytes, but"):
        open_checkpoint(packed)


@pytest.mark.parametrize("size", [100, None])
def test_a_file_that_changes_while_it_is_read(packed, size):
    file = packed / "layer-00002.safetensors"
    with open_checkpoint(packed).each_expert(2, E, H, I) as experts:
        os.truncate(file, size) if size else os.utime(file, (1, 1))
        with pytest.raises(ValueError, match="layer-00002.*changed since"):
            next(iter(experts))


def test_what_was_read_stays_valid(packed):
    experts = read_experts(packed, 2, E, H, I, [1])
    assert experts.gate[0] is None
    before = experts.gate[1].tiles.copy()
    shutil.rmtree(packed)
    assert np.array_equal(experts.gate[1].tiles, before)


def test_no_permission(packed, monkeypatch):
    import builtins

    real = open

    def refuse(path, *arguments, **options):
        if str(path).endswith("kt_manifest.json"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *arguments, **options)

    monkeypatch.setattr(builtins, "open", refuse)
    fails(packed, "kt_manifest.json", error=PermissionError)


class Config:
    num_experts, num_experts_per_tok, hidden_size, moe_intermediate_size = E, 2, H, I
    num_hidden_layers, first_k_dense_replace, architectures = 3, 1, ["X"]


def test_before_an_engine_loads_anything(packed):
    options = KTOptions.from_mapping(
        {"method": "AMXINT8", "weight_path": str(packed), "cpuinfer": 1}
    )
    prepare(options, Config(), ServedModel("served"))
    (packed / "layer-00002.safetensors").unlink()
    with pytest.raises(OptionError, match="--kt-weight-path .*layer-00002.*missing"):
        prepare(options, Config(), ServedModel("served"))
    other = KTOptions.from_mapping(
        {"method": "BF16", "weight_path": str(packed.parent), "cpuinfer": 1}
    )
    with pytest.raises(OptionError, match="this file belongs to a packed directory"):
        prepare(other, Config(), ServedModel("served"))


def test_the_loader_for_other_packages_code(good):
    loader = SafeTensorLoader(good)
    assert loader.has_tensor("layers.1.experts.gate")
    with pytest.raises(ValueError, match="packed"):
        loader.load_experts("layers.1")


# ---- any change at all

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 40) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=3,
)


def places(content, path=()):
    yield path
    children = (
        content.items()
        if isinstance(content, dict)
        else (enumerate(content) if isinstance(content, list) else ())
    )
    for key, value in children:
        yield from places(value, (*path, key))


@settings(
    max_examples=examples(400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_changed_manifests_never_give_other_weights(good, tmp_path_factory, data):
    """Refused by name, or what is loaded is what was packed."""
    content = json.loads((good / "kt_manifest.json").read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(list(places(content))[1:]))
        parent = content
        for key in path[:-1]:
            parent = parent[key]
        how = data.draw(st.sampled_from(["set", "drop", "nudge", "swap"]))
        if how == "set":
            parent[path[-1]] = data.draw(_JSON)
        elif how == "drop":
            del parent[path[-1]]
        elif how == "nudge" and type(parent[path[-1]]) is int:
            parent[path[-1]] += data.draw(st.sampled_from([-1, 1, 64]))
        elif isinstance(parent, dict):
            other = data.draw(st.sampled_from(sorted(parent)))
            parent[path[-1]] = copy.deepcopy(parent[other])
    folder = tmp_path_factory.mktemp("changed")
    for file in good.glob("layer*"):
        os.link(file, folder / file.name)
    (folder / "kt_manifest.json").write_text(json.dumps(content))
    try:
        found = loaded(2, "AMXINT8", folder)
    except (ValueError, OSError) as error:
        assert folder.name in str(error)
    else:
        assert torch.equal(forward(found), forward(loaded(2, "AMXINT8", good)))
    finally:
        shutil.rmtree(folder)


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_changed_bytes_of_a_manifest(good, tmp_path_factory, data):
    text = bytearray((good / "kt_manifest.json").read_bytes())
    position = data.draw(st.integers(0, len(text) - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "insert"]))
    if how == "flip":
        text[position] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        del text[position:]
    else:
        text[position:position] = data.draw(st.binary(min_size=1, max_size=3))
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "kt_manifest.json").write_bytes(text)
    try:
        read_manifest(str(folder))
    except ValueError as error:
        assert "kt_manifest.json" in str(error)
    finally:
        shutil.rmtree(folder)


def test_what_the_fixture_holds(good):
    """Nothing above has changed it."""
    files = contents(good)
    assert sorted(files) == ["kt_manifest.json", *(f"layer-0000{n}.safetensors" for n in (1, 2))]
    assert read_manifest(str(good)).layers[2].bytes == len(files["layer-00002.safetensors"])
