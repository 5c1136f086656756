"""Errors of packed weights, against the same numbers from the quantisation's rules in float64."""

import json

import pytest
import torch
from safetensors.torch import save_file

from kt_kernel.accuracy.weights import MATRICES, table, to_json, weight_report
from kt_kernel.testing import quantise_weights

E, H, I = 3, 128, 64  # noqa: E741
LAYERS = (1, 4)


@pytest.fixture
def source(tmp_path):
    return save(tmp_path / "source", weights())


def weights(experts=E):
    torch.manual_seed(0)
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    tensors = {
        f"model.layers.{layer}.mlp.experts.{e}.{name}_proj.weight": torch.randn(shape).bfloat16()
        for layer in LAYERS
        for e in range(experts)
        for name, shape in shapes.items()
    }
    tensors[f"model.layers.{LAYERS[0]}.mlp.experts.0.gate_proj.weight"][7] = 0
    tensors[f"model.layers.{LAYERS[0]}.mlp.experts.1.up_proj.weight"][9, 3] = 10
    return tensors


def save(folder, tensors):
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def expected(method, layer, name):
    """(relative, worst, expert, row)."""
    tensors = weights()
    every = [tensors[f"model.layers.{layer}.mlp.experts.{e}.{name}_proj.weight"] for e in range(E)]
    original = torch.stack(every).double()
    error = torch.stack([quantise_weights(method, w) for w in every]) - original
    rows = error.norm(dim=-1) / original.norm(dim=-1).clamp_min(1e-30)
    place = int(rows.argmax())
    return float(error.norm() / original.norm()), float(rows.max()), *divmod(place, len(every[0]))


@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "AMXINT4", "INT4_G32"])
def test_numbers(source, method):
    seen = []
    report = weight_report(source, source, method, threads=1, progress=seen.append)
    assert [row.layer for row in report] == list(LAYERS) and seen == report
    for row in report:
        for name in MATRICES:
            error = getattr(row, name)
            relative, worst, expert, number = expected(method, row.layer, name)
            assert error.relative == pytest.approx(relative, rel=1e-5)
            assert error.worst == pytest.approx(worst, rel=1e-5)
            if worst:
                assert (error.expert, error.row) == (expert, number)


def test_searched_scales_lose_less(source):
    """Of groups of 32, as much as test_scale_search.py says of normal weights."""
    plain, searched = (
        weight_report(source, source, "INT4_G32", layers=[4], threads=2, scale_search=search)[0]
        for search in (False, True)
    )
    for name in MATRICES:
        ratio = getattr(searched, name).relative / getattr(plain, name).relative
        assert 0.8 < ratio < 0.87


def test_searched_scales_on_pools(source, monkeypatch):
    """A pool's part of a row has the scales of the whole."""
    from kt_kernel.accuracy import layers

    check, found = layers.check_settings, []
    for pools in (1, 2):
        monkeypatch.setattr(
            layers, "check_settings", lambda p=pools, **s: check(**s | {"threadpool_count": p})
        )
        layer = layers.load_layer(source, 4, "INT4_G32", threads=2, scale_search=True)
        found.append([layer.unpacked(e, "down") for e in range(E)])
    assert all(map(torch.equal, *found))


def test_as_text(source):
    report = weight_report(source, source, "AMXINT4", threads=1)
    lines = table(report).splitlines()
    assert len(lines) == 2 + len(LAYERS) + 1
    assert lines[2].startswith("| 1 | ") and "up of expert 1, row 9: " in lines[2]
    assert lines[-1].startswith("| all | ")
    assert len(table(report[:1]).splitlines()) == 3
    assert json.loads(to_json(report))[0]["up"]["row"] == 9


def test_another_model(source, tmp_path):
    other = save(tmp_path / "other", weights(experts=2))
    with pytest.raises(ValueError, match=r"other: layer 1 .*\(2, 128, 64\).*expected the same"):
        weight_report(source, other, "AMXINT8", threads=1)


def test_quantised_source(tmp_path):
    tensors = {}
    for name, tensor in weights().items():
        tensors[name + "_packed"] = torch.zeros(len(tensor), tensor.shape[1] // 8).int()
        tensors[name + "_scale"] = 0.5 + torch.rand(len(tensor), tensor.shape[1] // 32).bfloat16()
        tensors[name + "_packed"][3] = 0x12345678  # other codes
    source = save(tmp_path / "source", tensors)
    for row in weight_report(source, source, "RAWINT4", threads=1):
        assert all(getattr(row, name).relative == 0 for name in MATRICES)
    for row in weight_report(source, source, "AMXINT4", threads=1):
        assert all(0 < getattr(row, name).relative < 0.2 for name in MATRICES), row
