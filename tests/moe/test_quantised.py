"""Weights that come quantised: taken over from files, from tensors and one by one, and refused."""

import dataclasses
import re

import pytest
import torch
from moe_cases import Case, form_of_case
from safetensors.torch import save_file

from kt_kernel.testing import moe_reference, quantise, quantise_weights, row_error, values_of
from kt_kernel.weights.formats import FP8_ROW, INT4_GROUP, WeightForm
from kt_kernel.weights.quantised import check_matrix

METHODS = ("FP8", "FP8_PERCHANNEL", "RAWINT4", "MXFP4", "NVFP4", "MXFP8")
MATRICES = ("gate", "up", "down")
BASE = "model.layers.0.mlp.experts"


def parts_of(method, matrix):
    """A matrix as checkpoints name its parts."""
    if method == "RAWINT4":
        return {"weight_packed": matrix.codes, "weight_scale": matrix.scale}
    if method == "NVFP4":
        return {
            "weight": matrix.codes,
            "weight_scale": matrix.scale,
            "weight_scale_2": torch.tensor(matrix.global_scale),
        }
    name = "weight_scale" if method == "FP8_PERCHANNEL" else "weight_scale_inv"
    return {"weight": matrix.codes, "scale" if method == "MXFP4" else name: matrix.scale}


def save(folder, case):
    save_file(
        {
            f"{BASE}.{e}.{name}_proj.{part}": tensor
            for name, matrices in zip(MATRICES, case.sources, strict=True)
            for e, matrix in enumerate(matrices)
            for part, tensor in parts_of(case.method, matrix).items()
        },
        folder / "model.safetensors",
    )
    return folder


def unpacked(wrapper, case):
    """The weights that all slots on the CPU hold."""
    found = []
    for slot in wrapper._cpu_slots():
        for number, matrix in enumerate((case.gate, case.up, case.down)):
            out = torch.empty(matrix.shape[1:])
            wrapper._core.unpack(slot, number, out.numpy())
            found.append(out)
    return torch.cat([out.flatten() for out in found])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("pools", [1, 2])
def test_three_ways_of_loading(tmp_path, method, pools):
    case = Case(method=method, mapping=torch.tensor([4, 0, 0, 2, 1, 5]))
    case.options = {"gpu_experts_mask": torch.arange(6) == 3, "threadpool_count": pools}
    wanted = torch.cat(
        [
            quantise_weights(method, matrices[case.mapping[slot]]).float().flatten()
            for slot in (0, 1, 2, 4, 5)
            for matrices in case.sources
        ]
    )
    from_file = case.wrapper(load=False, weight_path=save(tmp_path, case))
    from_file.load_weights(case.mapping)
    one_by_one = case.wrapper(load=False)
    for slot in one_by_one._cpu_slots():
        one_by_one.load_expert(slot, *(every[case.mapping[slot]] for every in case.sources))
    one_by_one.finish_loading()
    for wrapper in (from_file, one_by_one, case.wrapper()):
        assert torch.equal(unpacked(wrapper, case), wanted)


@pytest.mark.parametrize("stored", ["FP8", "FP8_PERCHANNEL"])
@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "INT4_G32"])
def test_fp8_quantised_anew(tmp_path, stored, method):
    source = Case(method=stored)
    case = Case(method=method)
    case.gate, case.up, case.down = (
        torch.stack([values_of(matrix) for matrix in every]).float() for every in source.sources
    )
    wrapper = case.wrapper(load=False, weight_path=save(tmp_path, source))
    wrapper.load_weights(case.mapping)
    assert torch.equal(unpacked(wrapper, case), unpacked(case.wrapper(), case))


def test_no_expert_on_the_cpu():
    """No weights tell the groups; nothing needs them."""
    wrapper = Case(method="RAWINT4").wrapper(load=False, num_gpu_experts=6)
    wrapper.finish_loading()
    batch = Case().batch(3)
    assert bool((wrapper.forward(*batch) == 0).all())


CASE = Case(method="RAWINT4")


def other(matrix, **changes):
    return dataclasses.replace(matrix, **changes)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda m: CASE.up[1], TypeError, "up_proj of slot 1 must be a QuantisedMatrix, got Ten"),
        (
            lambda m: other(m, format=FP8_ROW),
            ValueError,
            "up_proj of slot 1 is FP8 with row scales; accepted: int4 with group scales or int4 "
            "with",
        ),
        (lambda m: other(m, format=99), ValueError, "is format 99; accepted"),
        (
            lambda m: other(m, codes=m.codes[:, 1:]),
            ValueError,
            "up_proj of slot 1.codes must be [32, 32]",
        ),
        (
            lambda m: other(m, codes=m.codes.int()),
            ValueError,
            "has dtype torch.int32; accepted: uint8",
        ),
        (lambda m: other(m, codes=None), TypeError, "codes must be a tensor, got NoneType"),
        (
            lambda m: other(m, scale=m.scale.double()),
            ValueError,
            "has dtype torch.float64; accepted: float16, bfloat16, float32",
        ),
        (lambda m: other(m, scale=m.scale[:, :0]), ValueError, "a multiple of 32 that divides 64"),
        (lambda m: other(m, scale=m.scale.repeat(1, 2)), ValueError, "got [32, 4]"),
        (lambda m: other(m, zero=m.codes), ValueError, "zero must be None for int4 with group"),
        (
            lambda m: other(m, scale=m.scale * torch.inf),
            ValueError,
            "expert slot 1, up row 0: a scale is NaN",
        ),
    ],
)
def test_wrong_matrices(change, error, text):
    wrapper = CASE.wrapper(load=False)
    given = [matrices[1] for matrices in CASE.sources]
    given[1] = change(given[1])
    with pytest.raises(error, match=re.escape(text)) as caught:
        wrapper.load_expert(1, *given)
    assert str(caught.value).startswith("layer 0: ")


@pytest.mark.parametrize("form", [WeightForm(INT4_GROUP, 64, 1), form_of_case("RAWINT4:zero")])
def test_matrices_of_two_forms(form):
    """Groups of another size, or with zero points, in up only."""
    case = Case(method="RAWINT4")
    gates, _, downs = case.sources
    ups = [quantise(matrix, form) for matrix in case.up]
    wrapper = case.wrapper(load=False)
    wrapper.load_weights_from_tensors(gates, ups, downs, case.mapping)
    batch = case.batch(5)
    wanted = moe_reference(*batch, gates, ups, downs, method="RAWINT4")
    assert row_error(wrapper.forward(*batch), wanted).max() < 0.01


def test_experts_of_two_forms():
    case = Case(method="RAWINT4", inter=64)
    wrapper = case.wrapper(load=False)
    wrapper.load_expert(0, *(matrices[0] for matrices in case.sources))
    wide = [quantise(m[1], WeightForm(INT4_GROUP, 64, 1)) for m in (case.gate, case.up, case.down)]
    with pytest.raises(ValueError, match=r"slot 1 is .*size 64\); slots loaded before are .*32"):
        wrapper.load_expert(1, *wide)
    with pytest.raises(ValueError, match=r"5 cold experts were not loaded"):
        wrapper.finish_loading()


def test_lists_of_matrices():
    wrapper = CASE.wrapper(load=False)
    gate, up, down = CASE.sources
    with pytest.raises(
        TypeError, match="gate_proj must be a sequence of 6 QuantisedMatrix for method R"
    ):
        wrapper.load_weights_from_tensors(CASE.gate, up, down, CASE.mapping)
    with pytest.raises(ValueError, match="down_proj must have 6 matrices, got 5"):
        wrapper.load_weights_from_tensors(gate, up, down[:5], CASE.mapping)
    with pytest.raises(TypeError, match="gate_proj must be a tensor, got list"):
        Case(method="INT4_G32").wrapper(load=False).load_weights_from_tensors(
            gate, up, down, CASE.mapping
        )
    assert not wrapper.loaded


def test_sizes_that_the_format_does_not_divide():
    for method, unit in (("MXFP4", 32), ("MXFP8", 32), ("NVFP4", 16), ("RAWINT4", 32)):
        case = Case(method=method, hidden=64, inter=unit)
        case.inter += unit // 2
        with pytest.raises(ValueError, match=f"={unit + unit // 2} is not divisible by .* {unit} "):
            case.wrapper(load=False)


def test_a_bad_scale_in_a_file(tmp_path):
    case = Case(method="FP8_PERCHANNEL")
    path = save(tmp_path, case)
    tensors = {}
    for name, matrices in zip(MATRICES, case.sources, strict=True):
        for e, matrix in enumerate(matrices):
            for part, tensor in parts_of(case.method, matrix).items():
                tensors[f"{BASE}.{e}.{name}_proj.{part}"] = tensor
    name = f"{BASE}.4.up_proj.weight_scale"
    tensors[name][3] = float("nan")
    save_file(tensors, path / "model.safetensors")
    wrapper = case.wrapper(load=False, weight_path=path)
    text = f"layer 0: weight_path {path}: .*model.safetensors: tensor '{name}': the scale at .3."
    with pytest.raises(ValueError, match=text):
        wrapper.load_weights(case.mapping)
    assert not wrapper.loaded and wrapper.packed_bytes == 0


@pytest.mark.parametrize("method", METHODS)
def test_forms(method):
    case = Case(method=method)
    chosen = case.sources[0][0]
    assert check_matrix("gate", chosen, (chosen.format,), 32, 64) == form_of_case(method)
