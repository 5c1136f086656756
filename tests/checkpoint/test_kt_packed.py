"""Weights that kt-kernel converted: what its wheel wrote (data/), and files made by its rules."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from grid import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from kt_cases import FOLDER, LARGE, MATRICES, SMALL, Case, source
from kt_writer import quantise, tensors_of, to_bytes
from safetensors.numpy import load_file, save_file

from kt_kernel import KTMoEWrapper
from kt_kernel.checkpoint import open_checkpoint
from kt_kernel.checkpoint.kt_kernel.tiles import row_major
from kt_kernel.conversion import Request, convert, make_plan
from kt_kernel.testing import moe_reference, values_of
from kt_kernel.utils.loader import BF16SafeTensorLoader, SafeTensorLoader

DATA = Path(__file__).parent / "data"
cases = pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
METHODS = {8: ("AMXINT8", "MOE_INT8"), 4: ("AMXINT4", "MOE_INT4")}


def folder_of(case: Case) -> Path:
    return DATA / ("kt_folder" if case == FOLDER else case.name)


def parts_of(case: Case, expert: int, matrix: str):
    """(codes, step) of each part: W = codes * step."""
    whole = source(case, expert, matrix)
    for weights in np.split(whole, case.parts, int(matrix == "down")):
        codes, scale = quantise(weights, case.bits)
        yield codes, scale * np.float32(1 if case.bits == 8 else 16)


def dequantised(case: Case, expert: int, matrix: str) -> np.ndarray:
    """What kt-kernel's codes stand for, float64 [N, K]."""
    parts = [
        codes * step[:, None].astype(np.float64) for codes, step in parts_of(case, expert, matrix)
    ]
    return np.concatenate(parts, int(matrix == "down"))


@cache
def expected(case: Case, expert: int, matrix: str) -> np.ndarray:
    """What we make of them, float64: the same, but for int8 columns in several parts, whose codes
    are rounded to the largest scale."""
    if case.bits == 4 or matrix != "down":
        return dequantised(case, expert, matrix)
    parts = list(parts_of(case, expert, matrix))
    step = np.max([step for _, step in parts], axis=0)
    ratios = [np.divide(own, step, where=step > 0, out=np.zeros_like(step)) for _, own in parts]
    codes = [
        np.rint(q.astype(np.float32) * ratio[:, None])
        for (q, _), ratio in zip(parts, ratios, strict=True)
    ]
    return np.concatenate(codes, 1) * step[:, None].astype(np.float64)


# --- the rules, against kt-kernel


@cases
def test_writer_makes_what_the_wheel_made(case):
    theirs, ours = load_file(DATA / case.name / "model.safetensors"), tensors_of(case)
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype
        np.testing.assert_array_equal(tensor, ours[name], name)


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
def test_writer_makes_what_the_wheel_made_of_larger_ones(case):
    digests = json.loads((DATA / "kt_digests.json").read_text())[case.name]
    ours = tensors_of(case)
    assert digests == {name: hashlib.sha256(t.tobytes()).hexdigest() for name, t in ours.items()}


# --- the reader


@pytest.mark.parametrize("case", [*SMALL, FOLDER], ids=lambda case: case.name)
def test_what_the_wheel_wrote(case):
    checkpoint = open_checkpoint(folder_of(case))
    sizes = (case.experts, case.hidden, case.inter)
    assert checkpoint.layers() == [case.layer] and checkpoint.where(case.layer).startswith("blk.")
    assert checkpoint.sizes(case.layer) == sizes
    found = checkpoint.read_experts(case.layer, *sizes)
    for expert in range(case.experts):
        for name in MATRICES:
            matrix = getattr(found, name)[expert]
            values, original = values_of(matrix).numpy(), source(case, expert, name)
            np.testing.assert_array_equal(values, expected(case, expert, name))
            # Half a step; 1/32 more where 4 bits are rounded from 8. A second rounding of int8.
            half = 0.5 if case.bits == 8 else 0.5 + 1 / 32
            steps = [np.repeat(s[:, None], q.shape[1], 1) for q, s in parts_of(case, expert, name)]
            step = np.concatenate(steps, int(name == "down"))
            bound = half * step
            if case.bits == 8 and name == "down" and case.parts > 1:
                bound = bound + half * step.max(1, keepdims=True)
            assert (np.abs(values - original) <= bound * (1 + 1e-5)).all()


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from([8, 4]),
    st.integers(1, 9),
    st.sampled_from([1, 2, 27, 28, 29, 56, 57, 60]),
    st.integers(0, 2**31),
)
def test_all_codes_in_all_shapes(bits, n, k, seed):
    rows, columns = 32 * n, k * (64 if bits == 8 else 128)
    least = -(1 << (bits - 1))
    codes = np.random.RandomState(seed).randint(least, -least, (rows, columns))
    data = torch.from_numpy(to_bytes(codes, bits))
    if seed % 2:  # not aligned
        data = torch.cat([data[:1], data])[1:]
    found = row_major(data, bits, rows, columns).numpy()
    if bits == 4:
        found = np.stack([found & 15, found >> 4], -1).reshape(rows, columns).astype(np.int64) - 8
    np.testing.assert_array_equal(found, codes)


@pytest.mark.parametrize("case", [*SMALL, FOLDER], ids=lambda case: case.name)
@pytest.mark.parametrize("pools", [1, 2, 3])
def test_through_the_wrapper(case, pools):
    method = METHODS[case.bits][pools == 2]
    wrapper = KTMoEWrapper(
        case.layer,
        case.experts,
        1,
        case.hidden,
        case.inter,
        weight_path=folder_of(case),
        threadpool_count=pools,
        cpuinfer_threads=pools,
        method=method,
    )
    wrapper.load_weights(torch.arange(case.experts).flip(0))
    stacks = []
    for number, name in enumerate(MATRICES):
        stacks.append([])
        for slot in range(case.experts):
            wanted = expected(case, case.experts - 1 - slot, name)
            out = torch.empty(wanted.shape)
            wrapper._core.unpack(slot, number, out.numpy())
            np.testing.assert_array_equal(out.numpy(), wanted.astype(np.float32))
            stacks[-1].append(torch.from_numpy(wanted))
    torch.manual_seed(0)
    x = torch.randn(5, case.hidden).bfloat16()
    ids, weights = torch.arange(5)[:, None] % case.experts, torch.rand(5, 1)
    y = wrapper.forward(x, ids, weights, None)
    plain = moe_reference(x, ids, weights, *map(torch.stack, stacks), rounded=False)
    assert (y.double() - plain).norm() < 0.02 * plain.norm()


def test_only_what_is_wanted(tmp_path):
    """The tensors of the other experts need not even be sound."""
    case = SMALL[0]
    tensors = tensors_of(case)
    tensors["blk.0.ffn_up_exps.1.numa.0.scale"][3] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    found = checkpoint.read_experts(0, 2, case.hidden, case.inter, [0])
    assert found.up[1] is None and found.up[0] is not None
    with pytest.raises(ValueError, match="ffn_up_exps.1.numa.0.scale.*nan"):
        checkpoint.read_experts(0, 2, case.hidden, case.inter)


def test_a_whole_directory_of_the_converter(tmp_path):
    """Other tensors of the model, copies for the backward pass, the config of an FP8 model."""
    case = SMALL[1]
    tensors = tensors_of(case)
    extra = {
        "blk.3.mlp.gate.weight": np.zeros((2, 64), np.float32),
        "blk.3.mlp.shared_experts.up_proj.weight": np.zeros((2, 64), np.float32),
        "mtp.layers.0.mlp.shared_experts.up_proj.weight": np.zeros((2, 64), np.float32),
        "blk.3.ffn_gate_bwd_exps.0.numa.0.weight": np.zeros(7, np.int8),
        "lm_head.weight": np.zeros((2, 64), np.float32),
    }
    files = {"model-00001-of-00002.safetensors": tensors, "model-00002-of-00002.safetensors": extra}
    for name, content in files.items():
        save_file(content, tmp_path / name)
    names = {name: file for file, content in files.items() for name in content}
    index = {"metadata": {"total_size": 0}, "weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "model_type": "deepseek_v3",
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "fmt": "e4m3",
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.model_type == "deepseek_v3" and checkpoint.layers() == [3]
    found = checkpoint.read_experts(3, 2, case.hidden, case.inter)
    np.testing.assert_array_equal(values_of(found.gate[1]).numpy(), expected(case, 1, "gate"))
    assert checkpoint.read_tensor("lm_head.weight").shape == (2, 64)


def test_loader_gives_the_parts():
    case = SMALL[1]
    loader = SafeTensorLoader(folder_of(case))
    found = loader.load_experts("blk.3")
    tensors = tensors_of(case)
    for name in MATRICES:
        for kind, key in (("weight", name), ("scale", f"{name}_scale")):
            assert len(found[key]) == 2 and len(found[key][1]) == 2
            stored = tensors[f"blk.3.ffn_{name}_exps.1.numa.0.{kind}"]
            np.testing.assert_array_equal(found[key][0][1].numpy(), stored)
    with pytest.raises(ValueError, match="layer 4 has no experts"):
        loader.load_experts("blk.4")
    with pytest.raises(ValueError, match="quantised"):
        BF16SafeTensorLoader(folder_of(case)).load_experts("blk.3")


@pytest.mark.parametrize("case", [*SMALL, FOLDER], ids=lambda case: case.name)
def test_packed_anew_as_it_is(tmp_path, case):
    """kt quant --from-kt, and what comes of it loads as the same weights."""
    method = METHODS[case.bits][0]
    request = Request(str(folder_of(case)), str(tmp_path / "out"), None, threads=1, from_kt=True)
    plan = make_plan(request)
    assert plan.method == method
    convert(plan)
    packed = open_checkpoint(tmp_path / "out")
    assert packed.sizes(case.layer) == (case.experts, case.hidden, case.inter)
    wrapper = KTMoEWrapper(
        case.layer,
        case.experts,
        1,
        case.hidden,
        case.inter,
        weight_path=tmp_path / "out",
        threadpool_count=2,
        cpuinfer_threads=2,
        method=method,
    )
    wrapper.load_weights(torch.arange(case.experts))
    for expert in range(case.experts):
        for number, name in enumerate(MATRICES):
            wanted = expected(case, expert, name)
            out = torch.empty(wanted.shape)
            wrapper._core.unpack(expert, number, out.numpy())
            np.testing.assert_array_equal(out.numpy(), wanted.astype(np.float32))


# --- errors

NAME = "blk.0.ffn_up_exps.1.numa.0"


def fails(path: Path, *words: object, case: Case = SMALL[0], method: str | None = None) -> None:
    with pytest.raises(ValueError) as caught:
        open_checkpoint(path).read_experts(
            case.layer, case.experts, case.hidden, case.inter, method=method
        )
    for word in words:
        assert str(word) in str(caught.value), str(caught.value)


def changed(folder: Path, case: Case = SMALL[0], **changes: np.ndarray | None) -> Path:
    """A file of the case's tensors, some of them replaced, added or (None) left out."""
    tensors = dict(tensors_of(case))
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.mark.parametrize("kind", ["weight", "scale"])
@pytest.mark.parametrize("matrix", MATRICES)
def test_a_missing_tensor(tmp_path, matrix, kind):
    name = f"blk.0.ffn_{matrix}_exps.1.numa.0.{kind}"
    fails(changed(tmp_path, **{name: None}), name, "is missing", "experts 0 to 1 in 1 parts")


def test_a_missing_part(tmp_path):
    case = Case(8, 3, 1, 64, 192)
    gone = [name for name in tensors_of(case) if ".numa.1." in name]
    path = changed(tmp_path, case, **dict.fromkeys(gone))
    fails(path, gone[0].rsplit(".", 1)[0], "is missing", "in 3 parts", case=case)
    more = {f"{NAME[:-1]}1.{kind}": np.zeros(4, np.float32) for kind in ("weight", "scale")}
    fails(changed(tmp_path, **more), "numa.1", "is missing", "in 2 parts")


def test_a_number_far_too_large(tmp_path):
    name = "blk.0.ffn_up_exps.999999999.numa.0.scale"
    fails(changed(tmp_path, **{name: np.zeros(64, np.float32)}), name, "too few")
    name = "blk.0.ffn_up_exps.0.numa.999999999.scale"
    fails(changed(tmp_path, **{name: np.zeros(64, np.float32)}), name, "too few")


@pytest.mark.parametrize(
    "value, words",
    [
        (np.zeros(8191, np.int8), ("shape [8191]", "expected [8192]")),
        (np.zeros((64, 128), np.int8), ("shape [64, 128]",)),
        (np.zeros(8192, np.float32), ("has dtype F32",)),
    ],
)
def test_wrong_weights(tmp_path, value, words):
    path = changed(tmp_path, **{f"{NAME}.weight": value})
    fails(path, path, f"{NAME}.weight", *words)


@pytest.mark.parametrize(
    "value, words",
    [
        (np.zeros(63, np.float32), ("shape [63]", "expected [64]")),
        (np.zeros(64, np.float64), ("has dtype F64",)),
        (np.full(64, np.nan, np.float32), ("nan", "accepted")),
        (np.full(64, -1, np.float32), ("-1", "accepted")),
        (np.full(64, np.inf, np.float32), ("inf", "accepted")),
    ],
)
def test_wrong_scales(tmp_path, value, words):
    path = changed(tmp_path, **{f"{NAME}.scale": value})
    fails(path, path, f"{NAME}.scale", *words)


def test_sizes_that_are_neither(tmp_path):
    """The first gate and the scales tell bits and sizes."""
    first = "blk.0.ffn_gate_exps.0.numa.0"
    path = changed(tmp_path, **{f"{first}.weight": np.zeros(100, np.int8)})
    fails(path, f"{first}.weight", "100 bytes", "neither int8 nor int4", "64 rows", "128 columns")
    path = changed(tmp_path, **{f"{first}.scale": np.zeros((8, 8), np.float32)})
    fails(path, f"{first}.scale", "[8, 8]", "one dimension")
    few = {
        f"{first}.weight": np.zeros(48 * 128, np.int8),
        f"{first}.scale": np.zeros(48, np.float32),
    }
    fails(changed(tmp_path, **few), f"{first}.scale", "48 rows", "multiples of 64", "int8")


def test_int8_beside_int4(tmp_path):
    path = changed(tmp_path, **{f"{NAME}.weight": np.zeros(4096, np.int8)})
    fails(path, f"{NAME}.weight", "[4096]", "[8192]")


def test_another_model(tmp_path):
    other = Case(8, 1, 3, 64, 64)
    words = ("2 experts of hidden size 128 and intermediate size 64", "expected 3 experts")
    fails(changed(tmp_path), tmp_path, *words, case=other)
    fails(
        changed(tmp_path),
        "layer 5 has no experts",
        "layers with experts: 0",
        case=Case(8, 1, 2, 128, 64, layer=5),
    )


@pytest.mark.parametrize("method", ["AMXINT4", "BF16", "INT4_G32", "FP8"])
def test_another_method(tmp_path, method):
    fails(changed(tmp_path), "kt-kernel's int8", "AMXINT8 or MOE_INT8", method, method=method)


@pytest.mark.parametrize(
    "name",
    [
        f"{NAME}.qzeros",
        "blk.0.ffn_up_exps.01.numa.0.weight",
        "blk.0.ffn_up_exps.1.numa.00.weight",
        "blk.0.ffn_up_exps.1.weight",
        "blk.0.ffn_gate_up_exps.1.numa.0.weight",
        "blk.0.ffn_up_exps.1.qzeros",
    ],
)
def test_other_names(tmp_path, name):
    path = changed(tmp_path, **{name: np.zeros(4, np.float32)})
    fails(path, name, "have an unknown packing", "numa.<part>")


def test_named_as_in_gguf(tmp_path):
    name = "blk.0.ffn_up_exps.weight"
    fails(changed(tmp_path, **{name: np.zeros(4, np.float32)}), name, "named as in GGUF")


def test_beside_the_model_itself(tmp_path):
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    path = changed(tmp_path, **{name: np.zeros((4, 4), np.float32)})
    fails(path, name, "together with packed ones", "blk.0.ffn_")


# --- folders of .kt files


def folder(tmp_path: Path) -> Path:
    shutil.copytree(folder_of(FOLDER), tmp_path / "kt")
    return tmp_path / "kt"


def part(path: Path, number: int = 1) -> Path:
    return path / "_layer_1" / f"_numa_{number}"


def test_folder_with_a_shorter_file(tmp_path):
    path = folder(tmp_path)
    file = part(path) / "INT8_up_0_4096Byte_quant_.kt"
    file.write_bytes(file.read_bytes()[:-1])
    fails(path, file, "4095 bytes", "4096", "truncated", case=FOLDER)


def test_folder_with_a_file_missing(tmp_path):
    path = folder(tmp_path)
    (part(path) / "INT8_up_0_256Byte_scale_.kt").unlink()
    fails(path, path, "blk.1.ffn_up_exps.0.numa.1.scale", "missing", case=FOLDER)


@pytest.mark.parametrize(
    "name", ["MOE_INT8_up_0_4096Byte_quant_.kt", "BF16_up_0_4096Byte_quant_.kt", "INT8_up_0.kt"]
)
def test_folder_with_other_files(tmp_path, name):
    path = folder(tmp_path)
    (part(path) / name).write_bytes(bytes(4096))
    fails(
        path, part(path) / name, "not a file of kt-kernel's int8 or int4", "kt quant", case=FOLDER
    )


def test_folder_with_a_file_twice(tmp_path):
    path = folder(tmp_path)
    (part(path) / "INT4_up_0_4096Byte_quant_.kt").write_bytes(bytes(4096))
    fails(path, "INT8_up_0_4096Byte_quant_.kt", "the same tensor as", "INT4_up_0", case=FOLDER)


def test_folder_with_copies_for_the_backward_pass(tmp_path):
    path = folder(tmp_path)
    (part(path) / "INT8_up_bwd_0_4096Byte_quant_.kt").write_bytes(bytes(4096))
    open_checkpoint(path).read_experts(1, 1, FOLDER.hidden, FOLDER.inter)


def test_folder_that_changes(tmp_path):
    path = folder(tmp_path)
    checkpoint = open_checkpoint(path)
    file = part(path) / "INT8_up_0_4096Byte_quant_.kt"
    file.write_bytes(file.read_bytes() + b"1")
    with pytest.raises(ValueError, match="changed since"):
        checkpoint.read_experts(1, 1, FOLDER.hidden, FOLDER.inter)


def test_folder_without_files(tmp_path):
    (tmp_path / "_layer_0" / "_numa_0").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="no .kt file"):
        open_checkpoint(tmp_path)
