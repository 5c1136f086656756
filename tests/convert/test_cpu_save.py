"""cpu_save=True: the packed layer is written where it belongs, or refused."""

import errno
import os
from dataclasses import replace

import pytest
import torch
from packed_cases import (
    E,
    H,
    I,
    K,
    contents,
    forward,
    loaded,
    run_convert,
    same_forward,
    save_checkpoint,
    wrapper,
)

from kt_kernel import KTMoEWrapper
from kt_kernel.checkpoint import read_experts
from kt_kernel.testing import quantise
from kt_kernel.weights.formats import BF16, INT4_GROUP, LayerForm, WeightForm, WeightFormat
from kt_kernel.weights.methods import METHODS, get_method
from kt_kernel.weights.store.manifest import read_manifest
from kt_kernel.weights.store.saving import check_target

DENSE = [name for name, method in METHODS.items() if method.takes_dense]


def weights(seed=0, biases=False):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    given = {
        "gate_proj": normal(E, I, H),
        "up_proj": normal(E, I, H),
        "down_proj": normal(E, H, I),
    }
    if biases:
        given |= {"gate_bias": normal(E, I), "up_bias": normal(E, I), "down_bias": normal(E, H)}
    return given


def save(path, layer=3, method="AMXINT8", mapping=None, given=None, **options):
    made = wrapper(layer, method, path, cpu_save=True, **options)
    order = torch.tensor(mapping if mapping is not None else range(E))
    made.load_weights_from_tensors(**(given or weights()), physical_to_logical_map_cpu=order)
    return made


@pytest.mark.parametrize("method", DENSE)
@pytest.mark.parametrize("biases", [False, True])
def test_what_is_saved_is_what_runs(tmp_path, method, biases):
    made = save(tmp_path / "a" / "out", method=method, given=weights(biases=biases))
    same_forward(made, loaded(3, method, tmp_path / "a" / "out"))


@pytest.mark.parametrize("gpu", [0, 1, E])
@pytest.mark.parametrize("mapping", [[0, 1, 2], [2, 2, 0]])
def test_all_experts_in_logical_order(tmp_path, gpu, mapping):
    """Whatever is on the GPU, and whatever slot they are in."""
    save(tmp_path / "whole")
    made = save(tmp_path / "out", mapping=mapping, num_gpu_experts=gpu)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    if gpu < E:
        same_forward(made, loaded(3, "AMXINT8", tmp_path / "out", mapping, num_gpu_experts=gpu))


def test_quantised_weights(tmp_path):
    form = get_method("MXFP4").form
    given = {n: [quantise(matrix, form) for matrix in w] for n, w in weights().items()}
    made = save(tmp_path / "out", method="MXFP4", given=given)
    same_forward(made, loaded(3, "MXFP4", tmp_path / "out"))


def test_matrices_of_different_forms(tmp_path):
    """Each as its file had it, and a dense one."""
    sources = {
        "gate_proj": WeightForm(WeightFormat("Q8_0")),
        "up_proj": WeightForm(INT4_GROUP, 32),
        "down_proj": None,
    }
    given = {
        name: list(every) if sources[name] is None else [quantise(w, sources[name]) for w in every]
        for name, every in weights().items()
    }
    made = save(tmp_path / "out", method="LLAMAFILE", given=given)
    form = read_manifest(str(tmp_path / "out")).layers[3].spec.form
    q8_0 = WeightForm(WeightFormat("Q8_0"))
    assert form == LayerForm(q8_0, WeightForm(INT4_GROUP, 32), WeightForm(BF16))
    same_forward(made, loaded(3, "LLAMAFILE", tmp_path / "out"))


def test_columns_in_another_order(tmp_path):
    """The packed bytes do not tell it."""
    matrix = quantise(weights()["gate_proj"][0], WeightForm(INT4_GROUP, 32))
    ordered = replace(matrix, order=torch.arange(H, dtype=torch.int32))
    settings = wrapper(3, "GPTQ_INT4", tmp_path / "out")._settings
    check_target(settings, [[matrix, matrix]])
    with pytest.raises(ValueError, match=r"layer 3: weights with a column order \(act-order\)"):
        check_target(settings, [[matrix, ordered]])


def test_bytes_are_those_of_the_converter(tmp_path):
    source = save_checkpoint(tmp_path / "source", layers=(3,))
    read = read_experts(source, 3, E, H, I)
    given = {f"{n}_proj": torch.stack(getattr(read, n)) for n in ("gate", "up", "down")}
    save(tmp_path / "saved", given=given)
    run_convert(source, tmp_path / "converted")
    found = [
        (tmp_path / name / "layer-00003.safetensors").read_bytes()
        for name in ("saved", "converted")
    ]
    bodies = [data[8 + int.from_bytes(data[:8], "little") :] for data in found]
    assert bodies[0] == bodies[1]


def test_layers_of_one_model_share_a_directory(tmp_path):
    out = tmp_path / "out"
    for layer in (5, 3, 4):
        save(out, layer, given=weights(layer))
    assert list(read_manifest(str(out)).layers) == [3, 4, 5]
    first = forward(loaded(3, "AMXINT8", out))
    assert not torch.equal(first, forward(loaded(4, "AMXINT8", out)))
    before = contents(out)
    save(out, 4, given=weights(4))  # the same once more
    assert contents(out) == before
    again = wrapper(4, "AMXINT8", out, cpu_save=True)
    again.load_weights(torch.arange(E))  # from there, so there is nothing to save
    same_forward(again, loaded(4, "AMXINT8", out))
    assert contents(out) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"given": weights(1)}, "layer-00003.*layer 3 already exists with other weights"),
        ({"method": "AMXINT4"}, "method 'AMXINT4', not 'AMXINT8'"),
    ],
)
def test_another_model_is_there(tmp_path, options, words):
    out = tmp_path / "out"
    save(out)
    before = contents(out)
    with pytest.raises(ValueError, match=words):
        save(out, **options)
    assert contents(out) == before


def test_another_hidden_size(tmp_path):
    save(tmp_path)
    up, down = torch.ones(E, I, 64), torch.ones(E, 64, I)
    given = {"gate_proj": up, "up_proj": up, "down_proj": down}
    with pytest.raises(ValueError, match="hidden_size 64, not 128"):
        save(tmp_path, 4, given=given, hidden_size=64)


def test_a_converted_directory(tmp_path):
    out = run_convert(save_checkpoint(tmp_path / "source", layers=(3,)), tmp_path / "out")
    with pytest.raises(ValueError, match="holds a different conversion .*source None"):
        save(out)


def test_a_checkpoint_is_not_written_to(tmp_path):
    source = save_checkpoint(tmp_path / "source", layers=(3,))
    before = contents(source)
    with pytest.raises(ValueError, match="holds other files"):
        save(source)
    assert contents(source) == before
    file = source / "model-3.safetensors"
    with pytest.raises(ValueError, match="this is a file; expected a folder"):
        save(file)


def test_needs_a_path_and_whole_layers(tmp_path):
    with pytest.raises(ValueError, match="cpu_save=True needs weight_path"):
        KTMoEWrapper(3, E, K, H, I, cpu_save=True)
    with pytest.raises(TypeError, match="cpu_save must be True or False"):
        KTMoEWrapper(3, E, K, H, I, cpu_save=1, weight_path=tmp_path)
    made = wrapper(3, "AMXINT8", tmp_path / "out", cpu_save=True)
    given = weights()
    with pytest.raises(ValueError, match="use load_weights_from_tensors"):
        made.load_expert(0, **{name: every[0] for name, every in given.items()})
    assert not (tmp_path / "out").exists()


def test_a_layer_that_no_file_can_be_named_after(tmp_path):
    """Nor is a checkpoint with one converted: nothing could read the directory any more."""
    with pytest.raises(ValueError, match="layer 100000: .* 0 to 99999"):
        save(tmp_path / "out", layer=100000)
    source = save_checkpoint(tmp_path / "source", layers=(1, 100000))
    with pytest.raises(ValueError, match="layer 100000: .* 0 to 99999"):
        run_convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nothing_is_written_otherwise(tmp_path):
    made = wrapper(3, "AMXINT8", tmp_path / "out")
    made.load_weights_from_tensors(**weights(), physical_to_logical_map_cpu=torch.arange(E))
    bad = weights() | {"up_proj": torch.full((E, I, H), float("nan"))}
    with pytest.raises(ValueError, match="finite"):
        save(tmp_path / "out", given=bad)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_failing_write_leaves_the_layer_unloaded(tmp_path, monkeypatch, call):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    made = wrapper(3, "AMXINT8", tmp_path / "out", cpu_save=True)
    arguments = weights() | {"physical_to_logical_map_cpu": torch.arange(E)}
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match=str(tmp_path / "out")):
            made.load_weights_from_tensors(**arguments)
    assert not made.loaded
    assert os.listdir(tmp_path / "out") == []
    made.load_weights_from_tensors(**arguments)
    same_forward(made, loaded(3, "AMXINT8", tmp_path / "out"))
