"""kt_kernel.conversion.verify: every damage is found, and named."""

import json
import os
import random
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from packed_cases import run_convert, save_checkpoint
from safetensors.torch import load_file, save_file

import kt_kernel.conversion.run
import kt_kernel.conversion.verify
from kt_kernel.checkpoint import open_checkpoint
from kt_kernel.conversion.verify import Watcher, verify

KT_FOLDER = Path(__file__).parents[1] / "checkpoint" / "data" / "kt_folder"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def good(source, tmp_path_factory):
    return run_convert(source, tmp_path_factory.mktemp("good") / "out")


@pytest.fixture
def packed(good, tmp_path):
    return shutil.copytree(good, tmp_path / "packed")


def test_good(good):
    class Told(Watcher):
        total = seen = 0
        lock = threading.Lock()

        def begin(self, total):
            self.total = total

        def read(self, count):
            with self.lock:
                self.seen += count

    told = Told()
    verdict = verify(good, told)
    assert not verdict.problems and not verdict.notes and verdict.files == 2
    size = sum(file.stat().st_size for file in good.glob("layer*"))
    assert verdict.bytes == told.total == told.seen == size


@pytest.mark.parametrize("resume", [False, True])
def test_an_interrupt_does_not_wait_for_the_files(source, packed, monkeypatch, resume):
    """Files of two pieces each; the second is read after the interrupt."""
    read, begun = [], threading.Event()

    def one_piece(path, progress):
        begun.set()
        for piece in range(2):
            progress(1)
            read.append((path, piece))
            end = time.monotonic() + 20
            while time.monotonic() < end:  # until it raises
                progress(0)
                time.sleep(0.01)

    def interrupted(threads, function, entries):
        futures = [threads.submit(function, entry) for entry in entries]
        begun.wait()
        raise KeyboardInterrupt(futures)

    monkeypatch.setattr(ThreadPoolExecutor, "map", interrupted)
    for module in (kt_kernel.conversion.verify, kt_kernel.conversion.run):
        monkeypatch.setattr(module, "sha256_of", one_piece)
    with pytest.raises(KeyboardInterrupt):
        run_convert(source, packed, resume=True) if resume else verify(packed)
    assert all(piece == 0 for _, piece in read)


def test_every_flipped_bit(packed):
    """Sampled over each file, header and data."""
    generator = random.Random(0)
    for path in sorted(packed.iterdir()):
        data = path.read_bytes()
        count = 40 if path.suffix == ".safetensors" else 400
        for place in [0, 8, len(data) - 1, *(generator.randrange(len(data)) for _ in range(count))]:
            changed = bytearray(data)
            changed[place] ^= 1 << generator.randrange(8)
            path.write_bytes(changed)
            try:
                problems = verify(packed).problems
            except ValueError as error:  # nothing to compare with
                assert path.name == "kt_manifest.json"
                problems = [str(error)]
            assert problems and path.name in " ".join(problems), place
        path.write_bytes(data)
    assert not verify(packed).problems


def test_each_bad_file_is_named(packed):
    first, second = sorted(packed.glob("layer*"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    (packed / "layer-00007.safetensors").write_bytes(b"")
    (packed / "layer-00002.safetensors.partial").write_bytes(b"")
    verdict = verify(packed)
    assert len(verdict.problems) == 2
    assert str(first) in verdict.problems[0] and "No such file" in verdict.problems[0]
    assert str(second) in verdict.problems[1] and "bytes, but kt_manifest" in verdict.problems[1]
    assert [note.partition(":")[0] for note in verdict.notes] == [
        str(packed / "layer-00002.safetensors.partial"),
        str(packed / "layer-00007.safetensors"),
    ]


def test_a_conversion_that_was_not_finished(packed):
    path = packed / "kt_manifest.json"
    content = json.loads(path.read_text())
    del content["layers"]["1"]
    path.write_text(json.dumps(content))
    verdict = verify(packed)
    assert len(verdict.problems) == 1 and "layers 1 are missing" in verdict.problems[0]


def add_index(folder, edit=lambda names: None):
    names = {n: file.name for file in folder.glob("*.safetensors") for n in load_file(file)}
    edit(names)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize("indexed", [False, True])
def test_hugging_face(source, tmp_path, indexed):
    folder = shutil.copytree(source, tmp_path / "model")
    if indexed:
        add_index(folder)
    verdict = verify(folder)
    assert not verdict.problems and verdict.files == 2
    assert verdict.against == ("model.safetensors.index.json" if indexed else "the files' headers")
    first, second = sorted(folder.glob("*.safetensors"))
    os.truncate(first, first.stat().st_size - 1)
    second.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    problems = verify(folder).problems
    assert len(problems) == 2
    assert str(first) in problems[0] and "truncated" in problems[0]
    assert str(second) in problems[1] and "Git LFS pointer" in problems[1]
    assert len(verify(second).problems) == 1


def test_an_index_that_disagrees(source, tmp_path):
    folder = shutil.copytree(source, tmp_path / "model")
    name = "model.layers.1.mlp.experts.0.up_proj.weight"

    def edit(names):
        names["more"] = "model-1.safetensors"
        names["elsewhere"] = "model-9.safetensors"
        del names[name]

    add_index(folder, edit)
    problems = "\n".join(verify(folder / "model.safetensors.index.json").problems)
    assert problems == "\n".join(verify(folder).problems)
    assert "model-1.safetensors: tensor 'more' is missing" in problems
    assert f"model-1.safetensors: holds tensor '{name}', which according to" in problems
    assert "model-9.safetensors: missing, but" in problems


def test_other_formats(tmp_path):
    """Whose files count, too, and are named when something is wrong."""
    folder = shutil.copytree(KT_FOLDER, tmp_path / "kt")
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
    files = list(folder.rglob("*.kt"))
    assert open_checkpoint(folder).model_type == "qwen3_moe"
    verdict = verify(folder)
    assert not verdict.problems and verdict.files == len(files) > 0
    assert verdict.bytes == sum(file.stat().st_size for file in files)
    os.truncate(files[0], 3)
    with pytest.raises(ValueError, match=re.escape(str(files[0]))):
        verify(folder)


def test_between_the_files(tmp_path):
    for name in "ab":
        save_file({"x": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    (problem,) = verify(tmp_path).problems
    assert f"b.safetensors: tensor 'x' is also in {tmp_path / 'a.safetensors'}" in problem


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \*.safetensors file"):
        verify(tmp_path)
    with pytest.raises(OSError, match="nothing"):
        verify(tmp_path / "nothing")
