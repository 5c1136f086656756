"""Everything that can be wrong with a checkpoint: named, before any data is read."""

import json
import os
import pathlib
import shutil
import struct
import tempfile

import pytest
import torch
from safetensors.torch import save_file

from kt_kernel.checkpoint import open_checkpoint, read_experts

E, H, I = 4, 12, 8  # noqa: E741
SIZES = (E, H, I)
SHAPES = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
MOE = "model.layers.0.mlp.experts"


def per_expert(where=MOE, dtype=torch.bfloat16, experts=E):
    return {
        f"{where}.{e}.{name}.weight": torch.randn(shape).to(dtype)
        for e in range(experts)
        for name, shape in SHAPES.items()
    }


def stacked(dtype=torch.bfloat16):
    return {
        f"{MOE}.gate_up_proj": torch.randn(E, 2 * I, H).to(dtype),
        f"{MOE}.down_proj": torch.randn(E, H, I).to(dtype),
    }


def save(folder, tensors, name="model.safetensors", model_type="qwen3_moe"):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name)
    if model_type:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def raw(path, header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def fails(path, *words, error=ValueError):
    """Reading the first layer raises `error` with all of the words in its message."""
    with pytest.raises(error) as caught:
        read_experts(path, 0, *SIZES)
    for word in words:
        assert str(word) in str(caught.value), str(caught.value)


# --- which experts there are


def test_missing_expert(tmp_path):
    tensors = per_expert()
    del tensors[f"{MOE}.3.down_proj.weight"]
    fails(save(tmp_path, tensors), "model.safetensors", f"{MOE}.3.down_proj.weight", "missing")


def test_gap_in_the_numbers(tmp_path):
    tensors = {k: v for k, v in per_expert().items() if ".1." not in k}
    fails(save(tmp_path, tensors), f"{MOE}.1.gate_proj.weight", "missing")


@pytest.mark.parametrize("count", [E - 1, E + 1])
def test_other_number_of_experts(tmp_path, count):
    path = save(tmp_path, per_expert(experts=count))
    fails(path, "model.safetensors", f"{MOE}.{count - 1}", f"{count} experts", f"is {E}")


def test_other_number_of_stacked_experts(tmp_path):
    with pytest.raises(ValueError, match=r"gate_up_proj.*\[4, 16, 12\].*\[5, 16, 12\]"):
        read_experts(save(tmp_path, stacked()), 0, 5, H, I)


def test_incomplete_stack(tmp_path):
    tensors = stacked()
    del tensors[f"{MOE}.down_proj"]
    fails(save(tmp_path, tensors), f"{MOE}.down_proj", "missing")


def test_layer_without_experts(tmp_path):
    path = save(tmp_path, per_expert() | per_expert("model.layers.2.mlp.experts"))
    with pytest.raises(ValueError, match="layer 1 has no experts; layers with experts: 0, 2"):
        read_experts(path, 1, *SIZES)


def test_wrong_arguments(tmp_path):
    checkpoint = open_checkpoint(save(tmp_path, per_expert()))
    for arguments, name in [
        ((-1, *SIZES), "layer_idx"),
        ((0, 0, H, I), "num_experts"),
        ((0, E, 1.5, I), "hidden_size"),
        ((0, E, H, 0), "moe_intermediate_size"),
    ]:
        with pytest.raises(ValueError, match=name):
            checkpoint.read_experts(*arguments)
    for bad in ([E], [-1], [0.5]):
        with pytest.raises(ValueError, match="expert is"):
            checkpoint.read_experts(0, *SIZES, experts=bad)


# --- shapes and dtypes


@pytest.mark.parametrize("which", SHAPES)
def test_wrong_shape(tmp_path, which):
    tensors = per_expert()
    name = f"{MOE}.2.{which}.weight"
    tensors[name] = tensors[name].T.contiguous()
    shape, wanted = list(tensors[name].shape), list(SHAPES[which])
    fails(save(tmp_path, tensors), "model.safetensors", name, shape, wanted)


def test_wrong_dtype(tmp_path):
    name = f"{MOE}.2.up_proj.weight"
    for dtype, word in [
        (torch.float64, "F64"),
        (torch.int8, "I8"),
        (torch.float8_e4m3fn, "F8_E4M3"),
    ]:
        folder = save(tmp_path / word, per_expert() | {name: torch.ones(I, H).to(dtype)})
        fails(folder, "model.safetensors", name, word, "BF16")


def test_mixed_dtypes(tmp_path):
    name = f"{MOE}.2.up_proj.weight"
    fails(save(tmp_path, per_expert() | {name: torch.ones(I, H)}), name, "F32", "BF16")


def test_stacked_in_the_other_orientation(tmp_path):
    tensors = {k: v.transpose(1, 2).contiguous() for k, v in stacked().items()}
    fails(save(tmp_path, tensors), "gate_up_proj", [E, H, 2 * I], [E, 2 * I, H])


# --- layouts


@pytest.mark.parametrize(
    "suffix", ["weight_scale_inv", "weight_packed", "weight_scale_2", "qweight", "scale"]
)
def test_half_of_a_quantisation(tmp_path, suffix):
    """One expert has a scale that the others lack."""
    name = f"{MOE}.0.up_proj.{suffix}"
    missing = f"{MOE}.1.up_proj.{suffix}' is missing"
    fails(save(tmp_path, per_expert() | {name: torch.ones(1)}), missing, name)


@pytest.mark.parametrize(
    "parts", [("qweight", "scales"), ("weight_scale",), ("weight", "weight_scale", "weight_shape")]
)
def test_tensors_that_are_no_known_quantisation(tmp_path, parts):
    tensors = {
        name.removesuffix("weight") + part: tensor.clone()
        for name, tensor in per_expert().items()
        for part in parts
    }
    fails(save(tmp_path, tensors), MOE, ", ".join(sorted(parts)), "no known format", "GPTQ, AWQ")


def test_only_scales_of_activations(tmp_path):
    tensors = {n.replace("weight", "input_scale"): torch.ones(1) for n in per_expert()}
    fails(save(tmp_path, tensors), f"{MOE}.0.gate_proj.weight", "missing")


def test_unknown_part_of_an_expert(tmp_path):
    name = f"{MOE}.0.up_proj.strange"
    fails(save(tmp_path, per_expert() | {name: torch.ones(1)}), name, "unknown name")


def test_unexpected_companion_of_a_stack(tmp_path):
    name = f"{MOE}.gate_up_proj_bias"
    fails(save(tmp_path, stacked() | {name: torch.ones(E, 2 * I)}), name, "unexpected tensor")


def test_number_written_twice(tmp_path):
    name = f"{MOE}.01.up_proj.weight"
    fails(save(tmp_path, per_expert() | {name: torch.ones(I, H)}), name, "unknown name")


def test_two_namings(tmp_path):
    name = f"{MOE}.1.w1.weight"
    fails(save(tmp_path, per_expert() | {name: torch.ones(I, H)}), "other naming scheme")


def test_per_expert_and_stacked(tmp_path):
    fails(save(tmp_path, per_expert() | stacked()), "several places")


def test_no_gate(tmp_path):
    tensors = {k: v for k, v in per_expert().items() if "gate_proj" not in k}
    fails(save(tmp_path, tensors), f"{MOE}.0.gate_proj.weight", "missing")


def test_experts_elsewhere_than_the_family_has_them(tmp_path):
    tensors = per_expert("model.layers.0.block.experts")
    fails(save(tmp_path, tensors), "qwen3_moe", "model.layers.0.block.experts.0", MOE)


def test_stacked_needs_config(tmp_path):
    fails(save(tmp_path, stacked(), model_type=None), f"{MOE}.down_proj", "config.json")


def test_stacked_of_unknown_model(tmp_path):
    fails(save(tmp_path, stacked(), model_type="strange_moe"), f"{MOE}.down_proj", "'strange_moe'")


@pytest.mark.parametrize("model_type", [None, "strange_moe"])
@pytest.mark.parametrize("where", [MOE, "layers.0.experts", "a.layers.0.b.c.experts"])
def test_per_expert_names_need_no_known_model(tmp_path, model_type, where):
    tensors = per_expert(where) | {
        "model.layers.0.mlp.shared_experts.up_proj.weight": torch.ones(1)
    }
    found = read_experts(save(tmp_path, tensors, model_type=model_type), 0, *SIZES)
    for e in range(E):
        assert torch.equal(found.down[e], tensors[f"{where}.{e}.down_proj.weight"])


def test_ambiguous_place(tmp_path):
    tensors = per_expert() | per_expert("draft.layers.0.mlp.experts")
    fails(save(tmp_path / "a", tensors, model_type=None), "several places", "draft.layers.0")
    found = read_experts(save(tmp_path / "b", tensors), 0, *SIZES)  # the family says which
    assert torch.equal(found.up[1], tensors[f"{MOE}.1.up_proj.weight"])


@pytest.mark.parametrize("text", ["{", "[]", '"\\ud800', "\xff"])
def test_bad_config(tmp_path, text):
    save(tmp_path, per_expert(), model_type=None)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    fails(tmp_path, "config.json")


# --- several files


def shards(folder, index=True):
    """Two files, split in the middle of expert 1."""
    tensors = per_expert()
    names = list(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in parts.items():
        save(folder, {name: tensors[name] for name in part}, file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    if index:
        write_index(folder, weight_map)
    return tensors, weight_map


def write_index(folder, weight_map):
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("index", [True, False])
def test_shards(tmp_path, index):
    tensors, _ = shards(tmp_path, index)
    found = read_experts(tmp_path, 0, *SIZES)
    for e in range(E):
        for field in ("gate", "up", "down"):
            assert torch.equal(getattr(found, field)[e], tensors[f"{MOE}.{e}.{field}_proj.weight"])


def test_same_name_in_different_folders(tmp_path):
    tensors = per_expert()
    names = list(tensors)
    for folder, part in (("x", names[:7]), ("y/z", names[7:])):
        save(tmp_path / folder, {n: tensors[n] for n in part}, "model.safetensors", None)
    found = read_experts(tmp_path, 0, *SIZES)
    assert torch.equal(found.down[3], tensors[f"{MOE}.3.down_proj.weight"])
    assert torch.equal(found.down[0], tensors[f"{MOE}.0.down_proj.weight"])


def test_duplicate_tensor(tmp_path):
    save(tmp_path, per_expert())
    name = f"{MOE}.2.up_proj.weight"
    save(tmp_path / "more", {name: torch.ones(I, H)}, model_type=None)
    fails(tmp_path, name, tmp_path / "model.safetensors", tmp_path / "more" / "model.safetensors")


def test_index_decides_which_files_count(tmp_path):
    shards(tmp_path)
    save(tmp_path / "original", per_expert(), "consolidated.safetensors", None)
    save(tmp_path, per_expert(), "old-00001-of-00001.safetensors")
    read_experts(tmp_path, 0, *SIZES)


def test_index_names_a_missing_file(tmp_path):
    _, weight_map = shards(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    fails(tmp_path, "b.safetensors", "missing", "model.safetensors.index.json")


def one_warning(caplog, *words):
    (record,) = [r for r in caplog.records if r.name == "kt_kernel.checkpoint"]
    for word in words:
        assert str(word) in record.getMessage(), record.getMessage()


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.layers.0.mlp.shared_experts.up_proj.weight"]
)
def test_index_names_a_missing_tensor_that_nobody_needs(tmp_path, caplog, name):
    tensors, weight_map = shards(tmp_path)
    write_index(tmp_path, weight_map | {name: "b.safetensors"})
    found = read_experts(tmp_path, 0, *SIZES)
    assert torch.equal(found.up[3], tensors[f"{MOE}.3.up_proj.weight"])
    one_warning(caplog, "b.safetensors", name, "is missing")
    with pytest.raises(KeyError, match=name):
        open_checkpoint(tmp_path).read_tensor(name)


def test_index_names_a_missing_expert(tmp_path):
    _, weight_map = shards(tmp_path)
    name = f"{MOE}.{E}.gate_proj.weight"
    write_index(tmp_path, weight_map | {name: "b.safetensors"})
    save(tmp_path, {f"{MOE}.{E}.up_proj.weight": torch.ones(I, H)}, "a2.safetensors")
    weight_map |= {name: "b.safetensors", f"{MOE}.{E}.up_proj.weight": "a2.safetensors"}
    write_index(tmp_path, weight_map)
    fails(tmp_path, f"tensor {name!r} is missing", "model.safetensors.index.json lists it")


def test_index_omits_tensors(tmp_path, caplog):
    """The files count, as in the engines: experts and others."""
    tensors, weight_map = shards(tmp_path)
    save(tmp_path, {"mtp.fc.weight": torch.ones(2)}, "c.safetensors")
    weight_map["norm.weight"] = "c.safetensors"
    save(tmp_path, {"mtp.fc.weight": torch.ones(2), "norm.weight": torch.ones(2)}, "c.safetensors")
    name = f"{MOE}.3.down_proj.weight"
    del weight_map[name]
    write_index(tmp_path, weight_map)
    found = read_experts(tmp_path, 0, *SIZES)
    assert torch.equal(found.down[3], tensors[name])
    one_warning(caplog, name, "(and 1 more)")


def test_index_names_the_wrong_file(tmp_path, caplog):
    tensors, weight_map = shards(tmp_path)
    name = f"{MOE}.3.up_proj.weight"
    write_index(tmp_path, weight_map | {name: "a.safetensors"})
    found = read_experts(tmp_path, 0, *SIZES)
    assert torch.equal(found.up[3], tensors[name])
    one_warning(caplog, "a.safetensors", name)


def test_a_tensor_twice_that_nobody_needs(tmp_path):
    save(tmp_path, per_expert() | {"lm_head.weight": torch.ones(2)})
    save(tmp_path / "more", {"lm_head.weight": torch.zeros(2)}, model_type=None)
    read_experts(tmp_path, 0, *SIZES)
    with pytest.raises(ValueError, match="lm_head.weight' is also in .*model.safetensors"):
        open_checkpoint(tmp_path).read_tensor("lm_head.weight")


@pytest.mark.parametrize("place", ["lm_head.weight", f"{MOE}.1.up_proj.weight"])
def test_a_type_of_the_future(tmp_path, place):
    """The safetensors library refuses all of such a file."""
    tensors = per_expert() | {"lm_head.weight": torch.ones(3), "odd": torch.ones(1).to(torch.int8)}
    path = save(tmp_path, tensors) / "model.safetensors"
    edit_dtype(path, place, "F31")
    if place in per_expert():
        fails(tmp_path, path, repr(place), "F31", "BF16")
        return
    found = read_experts(tmp_path, 0, *SIZES)
    stacks = stacked()
    for e in range(E):
        for field in ("gate", "up", "down"):
            assert torch.equal(getattr(found, field)[e], tensors[f"{MOE}.{e}.{field}_proj.weight"])
    with pytest.raises(ValueError, match="lm_head.weight' has dtype F31; accepted: BOOL, U8"):
        open_checkpoint(tmp_path).read_tensor("lm_head.weight")
    folder = save(tmp_path / "stack", stacks | {"lm_head.weight": torch.ones(3)})
    edit_dtype(folder / "model.safetensors", "lm_head.weight", "F31")
    found = read_experts(folder, 0, *SIZES)
    assert torch.equal(found.down[2], stacks[f"{MOE}.down_proj"][2])


def edit_dtype(path, name, dtype):
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header[name]["dtype"] = dtype
    raw(path, header, content[8 + length :])


@pytest.mark.parametrize(
    "file", ["../a.safetensors", "/a.safetensors", 3, "a.bin", "a\0.safetensors"]
)
def test_index_with_a_bad_file_name(tmp_path, file):
    _, weight_map = shards(tmp_path)
    write_index(tmp_path, dict.fromkeys(weight_map, file))
    fails(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 99999]
)
def test_bad_index(tmp_path, text):
    shards(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    fails(tmp_path, path)
    fails(path, path)


def test_several_indices(tmp_path):
    shards(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    shutil.copy(index, tmp_path / "other.safetensors.index.json")
    read_experts(tmp_path, 0, *SIZES)
    index.rename(tmp_path / "another.safetensors.index.json")
    fails(tmp_path, "2 indices")


def test_two_models_below_one_folder(tmp_path):
    save(tmp_path / "a", per_expert())
    save(tmp_path / "b", per_expert("model.layers.1.mlp.experts"))
    fails(tmp_path, "more than one model")


def test_shards_of_two_models(tmp_path):
    """Without an index, which would say which of them count."""
    tensors = per_expert() | per_expert("model.layers.1.mlp.experts")
    for number, name in enumerate(("model-00001-of-00002", "model-00002-of-00003")):
        part = {n: t for n, t in tensors.items() if f"layers.{number}." in n}
        save(tmp_path, part, f"{name}.safetensors")
    fails(tmp_path, "model-00002-of-00003", "one of 3", "model-00001-of-00002", "one of 2")
    write_index(tmp_path, dict.fromkeys(per_expert(), "model-00001-of-00002.safetensors"))
    read_experts(tmp_path, 0, *SIZES)


# --- files


def test_nothing_there(tmp_path):
    fails(tmp_path / "none", "none", error=FileNotFoundError)
    fails(tmp_path / "none.safetensors", "none.safetensors", error=FileNotFoundError)
    fails(tmp_path, tmp_path, "no *.safetensors", error=FileNotFoundError)


@pytest.mark.parametrize(
    "name, word",
    [
        ("below/_layer_0/_numa_0/INT8_up_0.kt", "_layer_<number>"),
        ("pytorch_model.bin", "PyTorch"),
    ],
)
def test_other_formats(tmp_path, name, word):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF\3\0\0\0" + bytes(20))
    fails(tmp_path, word, path)


@pytest.mark.parametrize(
    "content, word",
    [
        (b"GGUF\3\0\0\0" + bytes(20), "GGUF"),
        (b"PK\3\4\0\0\x08\x08" + bytes(20), "pickle"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_other_formats_behind_the_name(tmp_path, content, word):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    fails(tmp_path, word, path)


def test_truncated_at_every_length(tmp_path):
    save(tmp_path, per_expert())
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for length in [*range(0, 64), *range(64, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        fails(path, path)
    path.write_bytes(whole + b"\0")
    fails(path, path)


A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header, data, words",
    [
        (b"", b"", ["JSON"]),
        (b"[" * 5000, b"", ["JSON"]),
        (b"[]", b"", ["list"]),
        (b"\xff\xfe", b"", ["JSON"]),
        (b'{"a": 1, "a": 2}', b"", ["duplicate", "'a'"]),
        ({"__metadata__": {"x": 1}}, b"", ["__metadata__"]),
        ({"a": 3}, b"", ["'a'"]),
        (b'{"\\ud800": {}}', b"", ["\\ud800", "Unicode"]),
        ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), ["'a'", "data_offsets"]),
        ({"a": A | {"dtype": ["F32"]}}, bytes(8), ["'a'"]),
        ({"a": A | {"shape": [-2]}}, bytes(8), ["'a'", "[-2]"]),
        ({"a": A | {"shape": [2.0]}}, bytes(8), ["'a'", "[2.0]"]),
        ({"a": A | {"shape": [True, 2]}}, bytes(8), ["'a'"]),
        ({"a": A | {"shape": [2**70]}}, bytes(8), ["'a'"]),
        ({"a": A | {"shape": [3]}}, bytes(12), ["'a'", "12 bytes"]),
        ({"a": A | {"shape": [2**62, 2**62]}}, bytes(8), ["'a'"]),
        ({"a": A | {"data_offsets": [8, 0]}}, bytes(8), ["'a'"]),
        ({"a": A | {"data_offsets": [0]}}, bytes(8), ["'a'", "data_offsets"]),
        ({"a": A | {"data_offsets": [8, 16]}}, bytes(16), ["'a'", "hole"]),
        ({"a": A, "b": A | {"data_offsets": [4, 12]}}, bytes(12), ["'b'", "overlaps"]),
        ({"a": A, "b": A}, bytes(8), ["overlaps"]),
        ({"a": A}, bytes(7), ["'a'", "truncated"]),
        ({"a": A}, bytes(9), ["9 bytes"]),
    ],
)
def test_bad_header(tmp_path, header, data, words):
    path = raw(tmp_path / "model.safetensors", header, data)
    fails(path, path, *words)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**8 + 1, 1000])
def test_bad_header_length(tmp_path, length):
    path = raw(tmp_path / "model.safetensors", {"a": A}, bytes(8), length)
    fails(path, path, length)


def test_special_files(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    fails(tmp_path, "not a file")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    fails(tmp_path, "model.safetensors", error=FileNotFoundError)
    (tmp_path / "model.safetensors").unlink()
    raw(tmp_path / "model.safetensors", {"a": A}, bytes(8))
    os.mkfifo(tmp_path / "config.json")
    fails(tmp_path, "config.json: not a file")


@pytest.mark.parametrize("locked", ["model.safetensors", "config.json", "inner", "."])
def test_no_permission(locked):
    root = os.geteuid() == 0
    folder = tempfile.mkdtemp()  # tmp_path itself is not open to other users
    try:
        os.chmod(folder, 0o755)
        base = save(pathlib.Path(folder), per_expert())
        save(base / "inner", {"x": torch.ones(1)}, "x.safetensors", None)
        for file in base.rglob("*"):
            file.chmod(0o755)
        os.chmod(base / locked, 0)
        if root:
            os.seteuid(65534)
        fails(base, os.path.normpath(base / locked), error=PermissionError)
    finally:
        if root:
            os.seteuid(0)
        os.chmod(os.path.join(folder, locked), 0o700)
        shutil.rmtree(folder)


def test_file_changed_after_opening(tmp_path):
    checkpoint = open_checkpoint(save(tmp_path, per_expert()))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors: changed"):
        checkpoint.read_experts(0, *SIZES)
    fails(tmp_path, "truncated")  # opened again, it says what is wrong
    tensors = per_expert()
    found = read_experts(save(tmp_path, tensors), 0, *SIZES)
    assert torch.equal(found.up[0], tensors[f"{MOE}.0.up_proj.weight"])


@pytest.mark.parametrize(
    ("path", "error", "word"),
    [
        (b"model", TypeError, "path must be a str or a path of str, got bytes"),
        (7, TypeError, "got int"),
        ("", ValueError, "path is empty"),
        ("a\0b", ValueError, "contains a NUL"),
        ("x" * 300, ValueError, "File name too long"),
        ("\ud800", ValueError, "surrogates not allowed"),
    ],
)
def test_what_is_no_path(path, error, word):
    fails(path, word, error=error)


def test_a_path_through_a_file(tmp_path):
    save(tmp_path, per_expert())
    path = tmp_path / "model.safetensors" / "more"
    fails(path, path, error=FileNotFoundError)


def test_a_link_to_itself(tmp_path):
    (tmp_path / "link").symlink_to("link")
    fails(tmp_path / "link", tmp_path / "link", "symbolic links")
