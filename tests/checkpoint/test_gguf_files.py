"""Which GGUF files make up a model: parts of a split one, folders, and what does not belong."""

import itertools
import re

import numpy as np
import pytest
from gguf_models import E, H, I, Model, write

from kt_kernel.checkpoint import open_checkpoint, read_experts

SIZES = (E, H, I)
MODEL = Model(("Q8_0",) * 3, layers=(0, 1))
COUNT = 7  # tensors of it


def split(folder, name="m", model=MODEL, **options):
    """The paths of its parts."""
    options = {"split_max_tensors": 3} | options
    model.save(folder / f"{name}.gguf", **options)
    paths = sorted(folder.glob(f"{name}-*.gguf"))
    assert len(paths) > 1
    return paths


def check(path, model=MODEL):
    found = read_experts(path, 1, *SIZES, method="LLAMAFILE")
    for expert in range(E):
        assert np.array_equal(found.down[expert].codes.numpy(), model.rows[1, "down"][expert])


def fails(path, *words, error=ValueError):
    with pytest.raises(error) as caught:
        open_checkpoint(path)
    for word in words:
        assert str(word) in str(caught.value), str(caught.value)


def edit(path, key, value, width=2):
    """Overwrites the value of a number of so many bytes."""
    data = bytearray(path.read_bytes())
    begin = data.index(key.encode()) + len(key) + 4
    data[begin : begin + width] = value.to_bytes(width, "little")
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("options", [{}, {"small_first_shard": True}, {"split_max_tensors": 1}])
def test_any_part_or_the_folder(tmp_path, options):
    paths = split(tmp_path, **options)
    for path in [*paths, tmp_path]:
        checkpoint = open_checkpoint(path)
        assert len(checkpoint.tensors) == COUNT and checkpoint.model_type == "qwen3_moe"
        assert checkpoint.sizes(0) == SIZES
        check(path)


def test_a_folder_is_searched(tmp_path):
    MODEL.save(tmp_path / "a" / "Q8_0" / "m.gguf")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "other.gguf").write_bytes(b"")
    (tmp_path / "README.md").write_text("")
    check(tmp_path)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_missing_part(tmp_path, number):
    paths = split(tmp_path)
    paths[number].unlink()
    for path in [*paths[:number], *paths[number + 1 :], tmp_path]:
        fails(path, paths[number], "missing", "3 parts")


def test_parts_that_are_not_named_as_such(tmp_path):
    paths = split(tmp_path)
    path = tmp_path / "renamed.gguf"
    paths[0].rename(path)
    fails(path, path, "3 parts", "-00001-of-00003.gguf")
    other = tmp_path / "m-00001-of-00004.gguf"
    path.rename(other)
    fails(other, other, "3 parts")


def test_whole_model_named_as_a_part(tmp_path):
    path = MODEL.save(tmp_path / "m-00001-of-00002.gguf")
    fails(path, path, "split.count", "no other part")
    check(MODEL.save(tmp_path / "m-00001-of-00001.gguf"))


def test_parts_in_each_others_place(tmp_path):
    paths = split(tmp_path)
    paths[0].rename(tmp_path / "x")
    paths[1].rename(paths[0])
    (tmp_path / "x").rename(paths[1])
    fails(tmp_path, paths[0], "split.no is 1; expected 0")


def test_part_of_another_split(tmp_path):
    paths = split(tmp_path / "m")
    other = split(tmp_path / "other", split_max_tensors=4)
    assert len(other) == 2
    paths[1].write_bytes(other[1].read_bytes())
    fails(tmp_path / "m", paths[1], "split.count is 2; expected 3")


def test_part_of_a_model_with_more_tensors(tmp_path):
    paths = split(tmp_path / "m")
    larger = Model(("Q8_0",) * 3, layers=(0, 1), biases=True)
    more = split(tmp_path / "more", model=larger, split_max_tensors=5)
    paths[2].write_bytes(more[2].read_bytes())
    words = "split.tensors.count is 13; expected 7", "another model"
    fails(tmp_path / "m", paths[2], *words)


def test_numbers_of_parts_that_lie(tmp_path):
    paths = split(tmp_path)
    for path in paths:
        edit(path, "split.tensors.count", 8, 4)
    fails(tmp_path, paths[0], "split.tensors.count is 8", "have 7")


def test_a_tensor_in_two_parts(tmp_path):
    paths = split(tmp_path)
    data = paths[2].read_bytes()
    name = b"blk.0.ffn_gate_exps.weight"
    paths[2].write_bytes(data.replace(b"blk.1.ffn_down_exps.weight", name))
    fails(tmp_path, paths[2], name.decode(), "also in", paths[0])


def test_models_of_two_architectures(tmp_path):
    paths = split(tmp_path)
    keys = {"split.no": 1, "split.count": 3, "split.tensors.count": COUNT}
    write(paths[1], {"x": ("F32", np.ones(8, "f"))}, keys, "olmoe")
    fails(tmp_path, paths[1], "'olmoe'", "'qwen3moe'", "another model")


def test_split_numbers_that_are_none(tmp_path):
    keys = {"split.no": 0, "split.count": "three"}
    path = write(tmp_path / "m.gguf", MODEL.tensors(), keys)
    fails(path, path, "'split.count' is 'three'; expected a number")


def test_more_than_one_model(tmp_path):
    MODEL.save(tmp_path / "one.gguf")
    split(tmp_path / "sub", "two")
    fails(tmp_path, tmp_path, "2 GGUF models", "one.gguf", "sub/two-00001-of-00003.gguf", "name")
    check(tmp_path / "one.gguf")
    check(tmp_path / "sub")


@pytest.mark.parametrize(
    ("arch", "kind"), [("clip", None), ("qwen3moe", "mmproj"), ("llama", "imatrix")]
)
def test_files_beside_a_model(tmp_path, arch, kind):
    MODEL.save(tmp_path / "m.gguf")
    metadata = {"general.type": kind} if kind else {}
    write(tmp_path / "a.gguf", {"v.weight": ("F32", np.ones(8, "f"))}, metadata, arch)
    check(tmp_path)
    fails(tmp_path / "none", error=FileNotFoundError)


def test_both_formats(tmp_path):
    MODEL.save(tmp_path / "m.gguf")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model.safetensors").write_bytes(b"")
    fails(tmp_path, tmp_path, "both", "m.gguf", "model.safetensors", "name the file")
    check(tmp_path / "m.gguf")


def test_nothing_there(tmp_path):
    fails(tmp_path / "no.gguf", "no.gguf", error=FileNotFoundError)
    fails(tmp_path, "no *.safetensors", error=FileNotFoundError)


def test_a_folder_named_like_a_file(tmp_path):
    MODEL.save(tmp_path / "m.gguf" / "x.gguf")
    check(tmp_path / "m.gguf")


def test_a_part_added_later(tmp_path):
    paths = split(tmp_path)
    data = paths[1].read_bytes()
    paths[1].unlink()
    for path in (tmp_path, paths[0]):
        fails(path, paths[1], "missing")
    paths[1].write_bytes(data)
    for path in (tmp_path, paths[0]):
        check(path)
    checkpoint = open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path) is checkpoint
    paths[1].write_bytes(data)
    with pytest.raises(ValueError, match=re.escape(f"{paths[1]}: changed")):
        checkpoint.read_experts(1, *SIZES)


def test_a_model_added_later(tmp_path):
    MODEL.save(tmp_path / "a" / "m.gguf")
    check(tmp_path)
    MODEL.save(tmp_path / "a" / "n.gguf")
    fails(tmp_path, "2 GGUF models")


def test_names_in_any_order(tmp_path):
    """Many parts: the numbers are compared as such."""
    model = Model(("Q8_0",) * 3, layers=tuple(range(5)))
    paths = split(tmp_path, model=model, split_max_tensors=1)
    assert len(paths) == 16
    for path, layer in itertools.product((paths[0], paths[11]), (0, 4)):
        found = read_experts(path, layer, *SIZES)
        assert np.array_equal(found.up[1].codes.numpy(), model.rows[layer, "up"][1])
