"""Conversion: what it writes, whatever it is run with, and what it refuses."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from packed_cases import (
    LAYERS,
    METHODS,
    PROJECTIONS,
    E,
    H,
    I,
    contents,
    forward,
    loaded,
    run_convert,
    same_forward,
    save_checkpoint,
    shapes,
)
from safetensors.torch import load_file, save_file

from kt_kernel import _C, KTMoEWrapper
from kt_kernel.checkpoint import open_checkpoint
from kt_kernel.checkpoint.open_files import OpenFiles
from kt_kernel.checkpoint.safetensors import checkpoint as hugging_face
from kt_kernel.conversion import Progress, Request, make_plan, run
from kt_kernel.conversion.run import check_space
from kt_kernel.runtime.variant import native
from kt_kernel.serving.hybrid import HybridLayer
from kt_kernel.serving.options import KTOptions
from kt_kernel.weights.methods import get_method


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def int8(source, tmp_path_factory):
    return run_convert(source, tmp_path_factory.mktemp("int8") / "out")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("search", [True, False])
def test_tiles_are_those_of_the_packing_functions(source, tmp_path, method, search):
    """Compared with the reference packing of single matrices, which no layer takes part in."""
    out = open_checkpoint(run_convert(source, tmp_path / "out", method, scale_search=search))
    form = get_method(method).form
    for layer in LAYERS:
        weights = load_file(source / f"model-{layer}.safetensors")
        found = out.read_experts(layer, E, H, I, method=method)
        for name, shape in shapes().items():
            for expert in range(E):
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{PROJECTIONS[name]}"
                address = (weights[f"{stem}.weight"].data_ptr(), 0, 0, 1.0)
                wanted = native().pack(*form.core, *shape, address, 0, search)
                packed = getattr(found, name)[expert]
                assert packed.shape == shape and packed.form == form
                assert np.array_equal(packed.tiles, wanted)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("biases", [False, True])
def test_forward_is_that_of_the_checkpoint(tmp_path, method, biases):
    checkpoint = save_checkpoint(tmp_path / "source", biases=biases)
    out = run_convert(checkpoint, tmp_path / "out", method, scale_search=False)
    for layer in LAYERS:
        same_forward(loaded(layer, method, out), loaded(layer, method, checkpoint))
    mapping, options = [2, 0, 2], {"num_gpu_experts": 1}
    same_forward(
        loaded(1, method, out, mapping, **options),
        loaded(1, method, checkpoint, mapping, **options),
    )


def test_behind_an_engine(source, int8):
    """The cold half of a layer, its weights from either."""
    results = []
    for path in (source, int8):
        options = {
            "method": "AMXINT8",
            "weight_path": str(path),
            "num_gpu_experts": 1,
            "cpuinfer": 1,
            "threadpool_count": 1,
        }
        layer = HybridLayer(
            KTOptions.from_mapping(options),
            layer_idx=2,
            num_experts=E,
            num_experts_per_tok=2,
            hidden_size=H,
            moe_intermediate_size=I,
        )
        layer.finish_loading()
        x = torch.linspace(-1, 1, 2 * H).reshape(2, H)
        layer.submit(x, torch.tensor([[0, 1], [2, 1]]), torch.ones(2, 2))
        results.append(layer.collect(x))
    assert results[0].abs().max() > 0 and torch.equal(*results)


def test_other_names_of_the_same_weights(source, int8):
    same_forward(loaded(1, "MOE_INT8", int8), loaded(1, "AMXINT8", source))


def test_experts_on_the_gpu_are_not_read(int8, monkeypatch):
    read, real = set(), OpenFiles.read_part

    def read_part(self, info, part=0, parts=1):
        read.add((part, parts))
        return real(self, info, part, parts)

    monkeypatch.setattr(OpenFiles, "read_part", read_part)
    loaded(1, "AMXINT8", int8, [1, 2, 0], num_gpu_experts=2)
    assert read == {(0, E)}


_WRITE_ALL = """
import sys
from kt_kernel.checkpoint.open_files import OpenFiles
from kt_kernel.conversion import Request, convert, make_plan
for method in ("AMXINT8", "INT4_G32"):
    convert(make_plan(Request(sys.argv[1], sys.argv[2] + method, method, threads=int(sys.argv[3]))))
"""


@pytest.mark.parametrize(
    ("threads", "topology", "table"),
    [(1, None, None), (3, None, "avx2"), (4, "0:0;1:1", "avx512")],
)
def test_bytes_do_not_depend_on_the_machine(source, int8, tmp_path, threads, topology, table):
    if table is not None and table not in _C.kernel_tables():
        pytest.skip(f"this CPU cannot run {table}")
    if topology and os.sched_getaffinity(0) < {0, 1}:
        pytest.skip("needs CPUs 0 and 1")
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    env |= {"KT_TOPOLOGY": topology} if topology else {}
    env |= {"KT_KERNEL_CPU_VARIANT": table} if table else {}
    command = [sys.executable, "-c", _WRITE_ALL, str(source), str(tmp_path) + "/", str(threads)]
    subprocess.run(command, env=env, check=True)
    assert contents(tmp_path / "AMXINT8") == contents(int8)
    run_convert(source, tmp_path / "here", "INT4_G32", threads=2)
    assert contents(tmp_path / "INT4_G32") == contents(tmp_path / "here")


def test_bytes_do_not_depend_on_where_the_source_is(source, int8, tmp_path):
    again = save_checkpoint(tmp_path / "elsewhere" / "copy")
    assert contents(run_convert(again, tmp_path / "out")) == contents(int8)


def test_the_files_are_safetensors_files(int8):
    tensors = load_file(int8 / "layer-00001.safetensors")
    assert sorted(tensors) == [f"layers.1.experts.{name}" for name in ("down", "gate", "up")]
    assert tensors["layers.1.experts.gate"].shape == (E, *native().packed_shape(1, 0, 0, I, H))
    checkpoint = open_checkpoint(int8)
    assert checkpoint.layers() == list(LAYERS) and checkpoint.sizes(2) == (E, H, I)
    assert checkpoint.model_type == "qwen3_moe" and checkpoint.where(1) == "layers.1.experts"
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read_tensor(name), tensor)
    with pytest.raises(KeyError, match="no tensor"):
        checkpoint.read_tensor("layers.9.experts.up")


def test_data_is_aligned(int8):
    for file in int8.glob("*.safetensors"):
        assert (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 64 == 0


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32", "fp8"])
def test_input_types(tmp_path, kind):
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    checkpoint = save_checkpoint(tmp_path / "source", dtype=dtypes.get(kind, torch.float32))
    if kind == "fp8":
        _make_fp8(checkpoint)
    other = "fp16" if kind == "bf16" else "bf16"
    with pytest.raises(ValueError, match=f"layer 1 are {kind}, but --input-type {other}"):
        run_convert(checkpoint, tmp_path / "out", input_type=other)
    assert not (tmp_path / "out").exists()
    named = {} if kind == "fp32" else {"input_type": kind}
    out = run_convert(checkpoint, tmp_path / "out", **named)
    same_forward(loaded(2, "AMXINT8", out), loaded(2, "AMXINT8", checkpoint))


def _make_fp8(folder):
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        scales = {
            n.replace(".weight", ".weight_scale_inv"): torch.rand(
                -(-t.shape[0] // 128), -(-t.shape[1] // 128)
            )
            for n, t in tensors.items()
        }
        save_file({n: t.to(torch.float8_e4m3fn) for n, t in tensors.items()} | scales, file)
    config = {
        "model_type": "deepseek_v3",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_stacked_experts_under_other_names(tmp_path):
    """Granite's have no "experts" in their names; the shared one is no expert of the layer."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "block_sparse_moe.input": (E, 2 * I, H),
        "block_sparse_moe.output": (E, H, I),
        "shared_mlp.input": (2 * I, H),
    }
    (tmp_path / "source").mkdir()
    save_file(
        {
            f"model.layers.{layer}.{name}_linear.weight": torch.randn(shape, generator=generator)
            for layer in range(3)
            for name, shape in shapes.items()
            if layer or name.startswith("shared")
        },
        tmp_path / "source" / "model.safetensors",
    )
    (tmp_path / "source" / "config.json").write_text('{"model_type": "granitemoeshared"}')
    out = run_convert(tmp_path / "source", tmp_path / "out", "AMXINT4")
    assert open_checkpoint(out).layers() == [1, 2]
    same_forward(loaded(2, "AMXINT4", out), loaded(2, "AMXINT4", tmp_path / "source"))


@pytest.mark.parametrize(
    "name", ["int8-1-128x64", "int8-2-64x128", "int4-1-128x128", "int4-2-128x256", "kt_folder"]
)
def test_what_kt_kernel_converted(tmp_path, name):
    """The same as loading it; what its columns in two parts become is kept, too."""
    path = Path(__file__).parents[1] / "checkpoint" / "data" / name
    out = run_convert(path, tmp_path / "out", None, from_kt=True)
    checkpoint = open_checkpoint(out)
    method = "AMXINT4" if name.startswith("int4") else "AMXINT8"
    assert checkpoint.method == method and checkpoint.layers() == open_checkpoint(path).layers()
    (layer,) = checkpoint.layers()
    experts, hidden, inter = checkpoint.sizes(layer)
    x, results = torch.linspace(-1, 1, 3 * hidden).reshape(3, hidden), []
    for place in (path, out):
        made = KTMoEWrapper(
            layer,
            experts,
            1,
            hidden,
            inter,
            method=method,
            cpuinfer_threads=1,
            threadpool_count=1,
            weight_path=place,
        )
        made.load_weights(torch.arange(experts))
        ids = torch.tensor([[0], [experts - 1], [0]])
        results.append(made.forward(x, ids, torch.ones(3, 1), None))
    assert results[0].abs().max() > 0 and torch.equal(*results)


def test_the_source_is_not_touched(source, tmp_path):
    def state():
        return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in source.iterdir()}

    before = state()
    run_convert(source, tmp_path / "out")
    assert state() == before


# ---- resuming


def test_resume_keeps_what_is_good_and_makes_the_rest(source, int8, tmp_path):
    out = run_convert(source, tmp_path / "out")
    first, second = (out / f"layer-0000{layer}.safetensors" for layer in LAYERS)
    kept = first.stat()
    data = bytearray(second.read_bytes())
    data[-1] ^= 1
    second.write_bytes(data)
    run_convert(source, out, resume=True)
    assert contents(out) == contents(int8)
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (kept.st_ino, kept.st_mtime_ns)
    second.unlink()
    run_convert(source, out, resume=True)
    assert contents(out) == contents(int8)
    run_convert(source, tmp_path / "new", resume=True)  # nothing there yet: begins
    assert contents(tmp_path / "new") == contents(int8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "AMXINT4"}, "method 'AMXINT4', not 'AMXINT8'"),
        ({"method": "MOE_INT8"}, "method 'MOE_INT8', not 'AMXINT8'"),
        ({"method": "INT4_G32"}, "method 'INT4_G32', .*scale_search True, not False"),
        ({"seed": 1}, "source "),
        ({"layers": (1, 2, 3)}, r"source .*layers \(1, 2, 3\), not \(1, 2\)"),
    ],
)
def test_resume_with_something_else(int8, tmp_path, change, words):
    before = contents(int8)
    method = change.pop("method", "AMXINT8")
    other = save_checkpoint(tmp_path / "other", **change)
    with pytest.raises(ValueError, match=f"{re.escape(str(int8))} holds a different .*{words}"):
        run_convert(other, int8, method, resume=True)
    assert contents(int8) == before


# ---- refusals


def test_planning_reads_no_weights(source, tmp_path, monkeypatch):
    """For a large model, an expert of each layer takes minutes."""
    read = []
    monkeypatch.setattr(hugging_face.Files, "read", lambda *a: read.append(a))
    make_plan(Request(str(source), str(tmp_path / "out"), "AMXINT8"))
    assert not read


def test_output_that_is_there(source, int8, tmp_path):
    with pytest.raises(ValueError, match=r"2 of 2 layers\); add --resume"):
        run_convert(source, int8)
    (tmp_path / "notes.txt").write_text("mine")
    for options in ({}, {"resume": True}):
        with pytest.raises(ValueError, match=r"holds other files \(notes.txt\)"):
            run_convert(source, tmp_path, **options)
    with pytest.raises(ValueError, match="a file; expected a folder"):
        run_convert(source, tmp_path / "notes.txt")


@pytest.mark.parametrize("place", [".", "sub", "sub/../.", "link", "link/sub"])
def test_output_in_the_input(tmp_path, place):
    source = save_checkpoint(tmp_path / "source")
    (source.parent / "link").symlink_to(source)
    output = source.parent / place if place.startswith("link") else source / place
    before = sorted(os.listdir(source))
    with pytest.raises(ValueError, match="is inside the input folder"):
        run_convert(source, output)
    assert sorted(os.listdir(source)) == before


def test_inputs_without_anything_to_convert(source, int8, tmp_path):
    with pytest.raises(ValueError, match=r"already a packed directory \(method AMXINT8\)"):
        run_convert(int8, tmp_path / "out")
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="no layer has experts; nothing to convert"):
        run_convert(tmp_path, tmp_path.parent / "out2")
    with pytest.raises(FileNotFoundError):
        run_convert(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(
        ValueError, match="are not quantised; choose their new format with --quant-method"
    ):
        run_convert(source, tmp_path / "out", None)
    with pytest.raises(ValueError, match="expected weights that kt-kernel converted"):
        run_convert(source, tmp_path / "out", from_kt=True)


def test_sizes_that_a_method_cannot_take(tmp_path):
    source = save_checkpoint(tmp_path / "source", hidden=96, inter=64)
    with pytest.raises(ValueError, match=r"source: layer 1: hidden_size=96 .*INT4_G128"):
        run_convert(source, tmp_path / "out", "INT4_G128")
    assert not (tmp_path / "out").exists()


def test_a_weight_that_cannot_be_converted(tmp_path):
    source = save_checkpoint(tmp_path / "source")
    tensors = load_file(source / "model-2.safetensors")
    tensors["model.layers.2.mlp.experts.1.up_proj.weight"][7, 3] = float("nan")
    save_file(tensors, source / "model-2.safetensors")
    with pytest.raises(ValueError, match="layer 2.*up row 7: .*finite"):
        run_convert(source, tmp_path / "out")
    assert sorted(contents(tmp_path / "out")) == ["kt_manifest.json", "layer-00001.safetensors"]
    with pytest.raises(ValueError, match="layer 2 is missing.*--resume"):
        loaded(2, "AMXINT8", tmp_path / "out")
    loaded(1, "AMXINT8", tmp_path / "out")


# ---- writing that fails


def test_too_little_space(source, tmp_path):
    with pytest.raises(OSError, match=r"out: 1073741824GB are needed, but only [\d.]+GB are"):
        check_space(str(tmp_path / "not" / "there" / "out"), 1 << 60)


def test_space_is_checked_before_anything_is_written(source, tmp_path, monkeypatch):
    needed = []
    monkeypatch.setattr(run, "check_space", lambda folder, count: needed.append(count) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    files = contents(run_convert(source, tmp_path / "out"))
    assert needed == [sum(len(data) for name, data in files.items() if name.startswith("layer"))]


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
@pytest.mark.parametrize("at", [1, 2, 3, 5])
def test_failing_writes_leave_nothing_half(source, int8, tmp_path, monkeypatch, call, at):
    """The disk fills up at some write, sync or rename."""
    real, count = getattr(os, call), [0]

    def fail(*arguments):
        count[0] += 1
        if count[0] >= at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    monkeypatch.setattr(os, call, fail)
    out = tmp_path / "out"
    with pytest.raises(OSError) as caught:
        run_convert(source, out)
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC and str(caught.value.filename).startswith(str(out))
    assert not list(out.glob("*.partial"))
    run_convert(source, out, resume=True)
    assert contents(out) == contents(int8)


@pytest.mark.parametrize("name", ["kt_manifest.json.partial", "layer-00002.safetensors.partial"])
def test_no_permission(source, tmp_path, monkeypatch, name):
    real = os.open

    def refuse(path, *arguments):
        if os.fspath(path).endswith(name):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match=name.removesuffix(".partial")):
        run_convert(source, tmp_path / "out")


def test_an_interrupt_leaves_whole_layers(source, int8, tmp_path):
    class Interrupt(Progress):
        def packing(self, layer):
            if layer == 2:
                raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run_convert(source, out, progress=Interrupt())
    assert not list(out.glob("*.partial"))
    run_convert(source, out, resume=True)
    assert contents(out) == contents(int8)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_source_that_changes_meanwhile(tmp_path, layer):
    """The layers of one directory are of one model. What else comes to the folder is no matter."""

    class Changes(Progress):
        def packing(self, number):
            (source / "notes.txt").touch()
            if number == layer:
                save_checkpoint(source, seed=1)

    source, out = save_checkpoint(tmp_path / "source"), tmp_path / "out"
    with pytest.raises(ValueError, match=f"{source}/.*: changed during the conversion"):
        run_convert(source, out, progress=Changes())
    assert len(list(out.glob("layer-*"))) == LAYERS.index(layer)
    with pytest.raises(ValueError, match="holds a different conversion .*source"):
        run_convert(source, out, resume=True)


def test_one_conversion_at_a_time(source, tmp_path):
    class Another(Progress):
        def packing(self, layer):
            run_convert(source, tmp_path / "out", resume=True)

    with pytest.raises(BlockingIOError, match="another process is writing"):
        run_convert(source, tmp_path / "out", progress=Another())


def test_a_lock_that_was_left_behind_and_file_systems_without_locks(
    source, int8, tmp_path, monkeypatch
):
    import fcntl

    def unsupported(*arguments):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kt_manifest.json.lock").write_bytes(b"")
    assert contents(run_convert(source, tmp_path / "out")) == contents(int8)
    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert contents(run_convert(source, tmp_path / "other")) == contents(int8)


def test_writers_wait_for_each_other(tmp_path):
    """Each finds the lock's file gone or taken, again and again."""
    from concurrent.futures import ThreadPoolExecutor

    from kt_kernel.weights.store.lock import only_writer

    inside, most = [], []

    def enter(number):
        for _ in range(50):
            with only_writer(str(tmp_path), wait=True):
                inside.append(number)
                most.append(len(inside))
                inside.remove(number)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(enter, range(4)))
    assert len(most) == 200 and max(most) == 1 and not os.listdir(tmp_path)


def test_at_most_two_layers_in_memory_and_all_bytes_reported(tmp_path, monkeypatch):
    """Writing is made slow, so that packing would run ahead if it could."""
    import gc
    import time
    import weakref

    source = save_checkpoint(tmp_path / "source", layers=tuple(range(5)))
    alive, most = weakref.WeakSet(), []
    pack = run._pack

    def counted(plan, spec):
        gc.collect()
        most.append(len(alive) + 1)
        layer = pack(plan, spec)
        alive.add(layer)
        return layer

    class Told(Progress):
        total = wrote_bytes = 0

        def begin(self, layers, kept, total):
            self.total = total

        def wrote(self, count):
            self.wrote_bytes += count
            time.sleep(0.002)

    monkeypatch.setattr(run, "_pack", counted)
    told = Told()
    run_convert(source, tmp_path / "out", progress=told)
    assert max(most) == 2
    assert told.total == told.wrote_bytes > 0


def test_forward_tells_layers_apart(source):
    """What the comparisons of this module rest on."""
    assert not torch.equal(
        forward(loaded(1, "AMXINT8", source)), forward(loaded(2, "AMXINT8", source))
    )
