"""cpu_save=True with a checkpoint: the layer is quantised once, into the checkpoint's kt-packed."""

import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
import torch
from packed_cases import (
    E,
    H,
    I,
    contents,
    loaded,
    run_convert,
    same_forward,
    save_checkpoint,
    wrapper,
)
from safetensors.torch import save_file

from kt_kernel.checkpoint import open_checkpoint
from kt_kernel.conversion.verify import verify
from kt_kernel.moe import whole
from kt_kernel.weights.store.manifest import read_manifest

ORDER = torch.arange(E)


@pytest.fixture
def source(tmp_path):
    return save_checkpoint(tmp_path / "source", layers=(3, 4))


def load(path, layer=3, method="AMXINT8", mapping=ORDER, **options):
    made = wrapper(layer, method, path, cpu_save=True, **options)
    made.load_weights(mapping)
    return made


@pytest.fixture
def quantised(monkeypatch):
    """The layers that are quantised from here on."""
    found = []
    original = whole.WholeLayer.load_from_files

    def load_from_files(layer):
        found.append(layer.layer_idx)
        return original(layer)

    monkeypatch.setattr(whole.WholeLayer, "load_from_files", load_from_files)
    return found


@pytest.mark.parametrize("method", ["BF16", "AMXINT8", "AMXINT4", "INT4_G32", "MOE_INT4"])
@pytest.mark.parametrize("biases", [False, True])
def test_what_is_saved_is_what_runs(tmp_path, method, biases):
    source = save_checkpoint(tmp_path / "source", layers=(3,), biases=biases)
    before = contents(source)
    made = load(source, method=method)
    same_forward(made, loaded(3, method, source))
    same_forward(made, loaded(3, method, source / "kt-packed"))
    assert not verify(str(source / "kt-packed")).problems
    shutil.rmtree(source / "kt-packed")
    assert contents(source) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("file", [False, True])
def test_a_file_and_other_dtypes(tmp_path, dtype, file):
    """Of a file the copy is beside it."""
    source = save_checkpoint(tmp_path / "source", layers=(3,), dtype=dtype)
    path = source / "model-3.safetensors" if file else source
    made = load(path)
    same_forward(made, loaded(3, "AMXINT8", source / "kt-packed"))
    same_forward(made, loaded(3, "AMXINT8", path))


def test_experts_on_the_gpu_and_maps(tmp_path, source):
    """All experts are saved, in logical order, whatever is loaded of them."""
    load(source)
    whole_layer = contents(source / "kt-packed")
    for mapping, gpu in (([2, 2, 0], 0), ([2, 0, 1], 1), ([0, 1, 2], E)):
        shutil.rmtree(source / "kt-packed")
        made = load(source, mapping=torch.tensor(mapping), num_gpu_experts=gpu)
        assert contents(source / "kt-packed") == whole_layer and made.loaded
        if gpu < E:
            same_forward(made, loaded(3, "AMXINT8", source, mapping, num_gpu_experts=gpu))


def test_a_layer_is_quantised_once(source, quantised):
    """And the copy is no part of the checkpoint, which names and layers are read from."""
    first = [load(source, layer) for layer in (3, 4)]
    assert quantised == [3, 4]
    again = [load(source, layer, mapping=torch.tensor([1, 0, 2])) for layer in (3, 4)]
    assert quantised == [3, 4]
    for layer, made in zip((3, 4), again, strict=True):
        same_forward(made, loaded(layer, "AMXINT8", source, [1, 0, 2]))
    assert first[0].load_record.source_bytes == 3 * E * H * I * 2
    assert not any("kt-packed" in t.file for t in open_checkpoint(source).tensors.values())
    assert open_checkpoint(source / "kt-packed").layers() == [3, 4]
    assert verify(str(source)).files == 2


def test_a_packed_directory_is_loaded_as_it_is(tmp_path, source, quantised):
    out = run_convert(source, tmp_path / "out")
    before = contents(out)
    quantised.clear()
    for path in (out, out / "kt_manifest.json"):
        same_forward(load(path), loaded(3, "AMXINT8", out))
    assert quantised == [] and contents(out) == before


def test_quantised_checkpoints_are_copied_too(tmp_path):
    """As they are: a method that takes weights over does not quantise."""
    tensors = {}
    generator = torch.Generator().manual_seed(0)
    for e in range(E):
        for name, (rows, columns) in {
            "gate": (I, H),
            "up": (I, H),
            "down": (H, I),
        }.items():
            base = f"model.layers.3.mlp.experts.{e}.{name}_proj"
            codes = torch.randint(0, 100, (rows, columns), generator=generator, dtype=torch.uint8)
            tensors[f"{base}.weight"] = codes.view(torch.float8_e4m3fn)
            tensors[f"{base}.weight_scale_inv"] = torch.rand(
                -(-rows // 128), -(-columns // 128), generator=generator
            )
    save_file(tensors, tmp_path / "model.safetensors")
    made = load(tmp_path, method="FP8")
    same_forward(made, loaded(3, "FP8", tmp_path))
    same_forward(made, loaded(3, "FP8", tmp_path / "kt-packed"))


def test_a_copy_of_something_else(source, quantised):
    """Another method, other weights under the same names, or no packed directory at all."""
    folder = source / "kt-packed"
    load(source)
    before = contents(folder)
    words = rf"{folder} holds a packed copy of something else \(.*\); delete the folder, or"
    for layer in (3, 4):
        with pytest.raises(ValueError, match=rf"layer {layer}: .*{words}") as caught:
            load(source, layer, method="AMXINT4")
        assert "method 'AMXINT4', not 'AMXINT8'" in str(caught.value)
    save_checkpoint(source, layers=(3, 4), seed=1)
    with pytest.raises(ValueError, match=words) as caught:
        load(source)
    assert "source" in str(caught.value)
    assert contents(folder) == before
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=f"{folder}: holds other files"):
        load(source)
    shutil.rmtree(folder)
    folder.write_text("a file")
    with pytest.raises(ValueError, match=f"{folder}: this is a file; expected a folder"):
        load(source)
    assert quantised == [3]


def test_a_copy_of_another_version(source, quantised, monkeypatch):
    """Layers of it are loaded; none are added to it."""
    load(source)
    monkeypatch.setattr(whole, "generator", lambda: "kt-moe 99")
    same_forward(load(source), loaded(3, "AMXINT8", source))
    with pytest.raises(ValueError, match="generator 'kt-moe 99', not 'kt-moe"):
        load(source, 4)
    assert quantised == [3]


def test_a_folder_that_cannot_be_written_is_named_before_quantising(source, quantised):
    folder = source / "kt-packed"
    folder.symlink_to("nowhere")  # even for a user who may write everywhere
    with pytest.raises(OSError, match=str(folder)):
        load(source)
    assert quantised == []


@pytest.mark.parametrize("tensors", [False, True])
def test_a_folder_without_permission(quantised, monkeypatch, tensors):
    """Also where weights come as tensors. What is there already is loaded."""
    # The version is read from the installation, which another user may not be able to see.
    monkeypatch.setattr(whole, "generator", lambda: "kt-moe")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        source = save_checkpoint(folder / "source", layers=(3, 4))
        load(source, 3)
        made = wrapper(4, "AMXINT8", source / "out" if tensors else source, cpu_save=True)
        weights = torch.ones(E, I, H), torch.ones(E, I, H), torch.ones(E, H, I)
        packed = source / "out" if tensors else source / "kt-packed"
        for path in source.glob("*.safetensors"):
            path.chmod(0o644)
        for path in (source, source / "kt-packed"):
            path.chmod(0o555)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)
        try:
            with pytest.raises(PermissionError) as caught:
                if tensors:
                    made.load_weights_from_tensors(*weights, ORDER)
                else:
                    made.load_weights(ORDER)
            assert load(source, 3).loaded
        finally:
            if is_root:
                os.seteuid(0)
            for path in (source, source / "kt-packed"):
                path.chmod(0o755)
        assert caught.value.filename == str(packed) and caught.value.errno == errno.EACCES
        assert not made.loaded and quantised == [3]
        assert stat.S_ISDIR((source / "kt-packed").stat().st_mode)
        assert list(read_manifest(str(source / "kt-packed")).layers) == [3]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_failing_write_leaves_the_layer_unloaded(source, monkeypatch, call):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    made = wrapper(3, "AMXINT8", source, cpu_save=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(OSError, match=str(source / "kt-packed")):
            made.load_weights(ORDER)
    assert not made.loaded and os.listdir(source / "kt-packed") == []
    made.load_weights(ORDER)
    same_forward(made, loaded(3, "AMXINT8", source))


def test_weights_that_cannot_be_quantised_leave_nothing(source):
    tensors = {}
    path = source / "model-3.safetensors"
    for name, info in open_checkpoint(path).tensors.items():
        tensors[name] = torch.full(info.shape, float("nan"))
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"^layer 3: weight_path {source}: .*NaN"):
        load(source)
    assert not (source / "kt-packed").exists()


def test_a_checkpoint_that_changes_is_not_saved(source, monkeypatch):
    path = source / "model-4.safetensors"
    original = whole.WholeLayer.load_from_files

    def load_from_files(layer):
        packed = original(layer)
        os.utime(path, (0, 0))
        return packed

    monkeypatch.setattr(whole.WholeLayer, "load_from_files", load_from_files)
    with pytest.raises(ValueError, match=f"layer 3: {path}: changed while it was read"):
        load(source)
    assert not (source / "kt-packed").exists()
