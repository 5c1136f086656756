"""Files that fail or become shorter while they are read, and more files than may be open."""

import errno
import json
import os
import resource
from pathlib import Path

import pytest
import torch
from gguf_models import Model
from safetensors.torch import save_file

from kt_kernel.checkpoint import open_checkpoint
from kt_kernel.checkpoint.open_files import MAX_OPEN
from kt_kernel.conversion import Request, convert, make_plan

KT_FOLDER = Path(__file__).parent / "data" / "kt_folder"
E, H, I = 3, 512, 256  # noqa: E741  those of the GGUF models
MOE = "model.layers.0.mlp.experts"


def single_experts(folder):
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    return save(
        folder,
        {
            f"{MOE}.{e}.{name}.weight": torch.randn(shape).bfloat16()
            for e in range(E)
            for name, shape in shapes.items()
        },
    )


def stacks(folder):
    gate_up, down = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    return save(folder, {f"{MOE}.gate_up_proj": gate_up, f"{MOE}.down_proj": down})


def save(folder, tensors):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    return folder


def gguf(folder):
    return Model(kinds=("Q4_0", "Q4_0", "F16"), layers=(0,)).save(folder / "model.gguf")


def packed(folder):
    source = single_experts(folder.with_name("source"))
    convert(make_plan(Request(str(source), str(folder), "AMXINT8", threads=1)))
    return folder


def kt_files(folder):
    folder.symlink_to(KT_FOLDER, target_is_directory=True)
    return folder


SOURCES = (single_experts, stacks, gguf, packed, kt_files)


@pytest.fixture(params=SOURCES, ids=lambda write: write.__name__)
def source(request, tmp_path):
    return open_checkpoint(request.param(tmp_path / "model"))


def read_all(checkpoint):
    """What is read, by expert and field."""
    layer = checkpoint.layers()[0]
    with checkpoint.each_expert(layer, *checkpoint.sizes(layer)) as experts:
        return list(experts)


@pytest.mark.parametrize("reads", [0, 3])
def test_a_disk_that_fails(source, monkeypatch, reads):
    real, left = os.preadv, [reads]

    def preadv(*arguments):
        if not left[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        left[0] -= 1
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(OSError, match="Input/output error") as caught:
        read_all(source)
    assert caught.value.filename in {info.file for info in source.tensors.values()}


def test_a_file_that_becomes_shorter_during_a_read(source, monkeypatch):
    """After the check that comes before every read."""
    monkeypatch.setattr(os, "preadv", lambda *arguments: 0)
    with pytest.raises(ValueError, match="changed since the checkpoint was opened"):
        read_all(source)


def test_reads_in_pieces(source, monkeypatch):
    """The system may return less than was asked for."""
    whole, real = read_all(source), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, rest, at: real(file, [rest[0][:1000]], at))
    for (expert, fields), (other, again) in zip(read_all(source), whole, strict=True):
        assert expert == other and fields.keys() == again.keys()
        for field, matrix in fields.items():
            assert bytes_of(matrix) == bytes_of(again[field])


def bytes_of(matrix):
    parts = [matrix] if isinstance(matrix, torch.Tensor) else vars(matrix).values()
    arrays = (p.reshape(-1) for p in parts if hasattr(p, "reshape"))
    return [torch.as_tensor(array).view(torch.uint8).tolist() for array in arrays]


@pytest.mark.parametrize("write", [single_experts, stacks, gguf, packed])
def test_what_was_read_needs_no_file(tmp_path, write):
    checkpoint = open_checkpoint(write(tmp_path / "model"))
    found = read_all(checkpoint)
    before = [bytes_of(matrix) for _, fields in found for matrix in fields.values()]
    for info in checkpoint.tensors.values():
        os.truncate(info.file, 0)
    assert before == [bytes_of(matrix) for _, fields in found for matrix in fields.values()]


def test_more_files_than_may_be_open(tmp_path):
    count = 2 * MAX_OPEN
    names = ("gate_proj", "up_proj", "down_proj")
    for e in range(count):
        tensors = {f"{MOE}.{e}.{name}.weight": torch.full((8, 8), float(e)) for name in names}
        save_file(tensors, tmp_path / f"model-{e + 1:05}-of-{count:05}.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + MAX_OPEN + 8, hard))
    try:
        found = checkpoint.read_experts(0, count, 8, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [int(gate[0, 0]) for gate in found.gate] == list(range(count))
    assert not any("safetensors" in os.readlink(f"/proc/self/fd/{n}") for n in open_descriptors())


def open_descriptors():
    """Those that are still open when they are looked at."""
    return [n for n in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{n}")]


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "model.safetensors.index.json", "config.json", "kt_manifest.json", "m"],
)
def test_headers_that_cannot_be_read(tmp_path, name):
    """The first page of this process's memory is a file whose bytes are an I/O error."""
    if name == "config.json":
        save_file({f"{MOE}.0.up_proj.weight": torch.zeros(8, 8)}, tmp_path / "model.safetensors")
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match="Input/output error") as caught:
        open_checkpoint(tmp_path / name if name == "m" else tmp_path)
    assert caught.value.filename == str(tmp_path / name)


def test_a_fingerprint_that_cannot_be_read(source, monkeypatch):
    def pread(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(OSError, match="Input/output error") as caught:
        _ = source.fingerprint
    assert caught.value.filename in {info.file for info in source.tensors.values()}
