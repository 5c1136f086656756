"""The command kt: what it prints and how it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from outcome import failed
from safetensors.torch import save_file

import kt_kernel
from kt_kernel.checkpoint import open_checkpoint
from kt_kernel.cli import quant_progress
from kt_kernel.cli.progress import SizeColumn, bytes_bar

E, H, I = 2, 32, 64  # noqa: E741
KT_FOLDER = Path(__file__).parents[1] / "checkpoint" / "data" / "kt_folder"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    save_file(
        {
            f"model.layers.{layer}.mlp.experts.{e}.{name}.weight": torch.randn(shape).bfloat16()
            for layer in range(2)
            for e in range(E)
            for name, shape in shapes.items()
        },
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    return folder


@pytest.mark.parametrize("method", ["int8", "int4", "int4_g32", "moe_int8", "moe_int4"])
@pytest.mark.parametrize("named", [True, False])
def test_quant(kt, source, tmp_path, method, named):
    out = tmp_path / "out"
    paths = ["--input-path", source, "--output", out] if named else [source, out]
    options = ["--input-type", "bf16", "--threads", 1] if named else []
    code, stdout, stderr = kt("quant", *paths, "--quant-method", method, *options)
    assert (code, stderr) == (0, "")
    names = {"int8": "AMXINT8", "int4": "AMXINT4"}
    assert f"{out}: 2 layers for method {names.get(method, method.upper())}" in stdout
    assert stdout.count("\n") == 1
    assert open_checkpoint(out).sizes(1) == (E, H, I)
    assert kt("model", "verify", out)[0] == 0


@pytest.mark.parametrize(
    ("done", "total", "shown"),
    [
        (3 << 29, 5 << 30, "1.5/5.0 GB"),
        (1 << 30, 1 << 30, "1.0/1.0 GB"),
        (1 << 19, 3 << 20, "0.5/3.0 MB"),
        (0, 0, "0.0/0.0 MB"),
    ],
)
def test_sizes_in_a_progress_bar(done, total, shown):
    """The units of options, as in all messages."""
    bar = bytes_bar()
    task = bar.add_task("loading", total=total)
    bar.update(task, completed=done)
    [column] = [column for column in bar.columns if isinstance(column, SizeColumn)]
    assert column.render(bar.tasks[0]).plain == shown


def test_progress_in_a_log(capsys, monkeypatch):
    clock = iter([0.0, 20.0, 40.0, 100.0])
    monkeypatch.setattr(quant_progress.time, "monotonic", lambda: next(clock))
    with quant_progress.Shown() as shown:
        shown.begin(8, 4, 10 << 30)
        for layer in (4, 5, 6):
            shown.wrote(1 << 30)
            shown.packing(layer)
    assert capsys.readouterr().err.splitlines() == [
        "kt: layer 5 (6 of 8): 2GB of 10GB written, 0.05 GB/s, 3 min left",
        "kt: layer 6 (7 of 8): 3GB of 10GB written, 0.03 GB/s, 4 min left",
    ]


def test_resume_and_refusals(kt, source, tmp_path):
    out = tmp_path / "out"
    command = ("quant", source, out, "--quant-method", "int8")
    assert kt(*command)[0] == 0
    failed(kt(*command), 1, out, "add --resume to continue it")
    assert kt(*command, "--resume")[0] == 0
    failed(kt("quant", source, out, "--quant-method", "int4", "--resume"), 1, "method 'AMXINT4'")
    failed(kt("quant", source, source / "x", "--quant-method", "int8"), 1, "inside")
    failed(kt("quant", tmp_path / "no", out, "--quant-method", "int8"), 1, tmp_path / "no")
    failed(kt("quant", source, tmp_path / "o", "--quant-method", "int4_g128"), 1, "hidden_size=32")
    fp8 = ("--quant-method", "int8", "--input-type", "fp8")
    failed(kt("quant", source, tmp_path / "o", *fp8), 1, "layer 0 are bf16, but --input-type fp8")
    failed(kt("quant", "--from-kt", source, "-o", tmp_path / "o"), 1, "kt-kernel")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quant"], ["the input is missing", "--input-path", "--from-kt"]),
        (["quant", "a"], ["the output is missing", "--output"]),
        (["quant", "a", "b", "-i", "c", "--quant-method", "int8"], ["given more than once"]),
        (["quant", "a", "b"], ["--quant-method", "required"]),
        (["quant", "a", "b", "--quant-method", "int9"], ["'int9'", "'int4_g128'"]),
        (["quant", "a", "b", "--quant-method", "int8", "--input-type", "f32"], ["'f32'", "'fp8'"]),
        (["quant", "a", "b", "--quant-method", "int8", "--threads", "0"], ["--threads"]),
        (["quant", "a", "b", "--nothing"], ["--nothing"]),
        (["nothing"], ["nothing"]),
        (["model", "nothing"], ["nothing"]),
        (["model", "verify"], ["path"]),
        (["bench", "nothing"], ["nothing"]),
        (["bench", "trace"], ["file"]),
        (["bench", "trace", "a", "--tokens", "0"], ["--tokens"]),
    ],
)
def test_usage(kt, arguments, words):
    failed(kt(*arguments), 2, *words)


def test_help(kt):
    for arguments in ([], ["bench"], ["model"]):
        code, stdout, stderr = kt(*arguments)
        assert code == 2 and "Usage: kt" in stdout and stderr == ""
    code, stdout, _ = kt("quant", "--help")
    assert code == 0
    for word in ("--input-path", "--input-type", "--output", "--quant-method", "--resume"):
        assert word in stdout


def test_the_command_line_does_not_need_torch():
    """Help, wrong usage and completion come before torch's import, which takes seconds."""
    code = "import sys, kt_kernel.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_verify(kt, source, tmp_path):
    out = tmp_path / "out"
    kt("quant", source, out, "--quant-method", "int8")
    code, stdout, stderr = kt("model", "verify", out)
    assert (code, stderr) == (0, "") and f"{out}: 2 files" in stdout
    assert kt("model", "verify", source)[:1] == (0,)
    for layer in range(2):
        file = out / f"layer-0000{layer}.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    code, stdout, stderr = kt("model", "verify", out)
    assert (code, stdout) == (1, "") and stderr.count("\n") == 2
    for layer, line in enumerate(stderr.splitlines()):
        assert line.startswith(f"kt: error: {out}/layer-0000{layer}.safetensors: SHA-256")
    failed(kt("model", "verify", tmp_path / "no"), 1, tmp_path / "no")


def test_version(kt):
    code, stdout, stderr = kt("version")
    assert (code, stderr) == (0, "")
    rows = dict(line.split(maxsplit=1) for line in stdout.splitlines())
    assert list(rows) == ["python", "platform", "cuda", "kt-moe", "sglang", "vllm"]
    assert rows["python"] == ".".join(map(str, sys.version_info[:3]))
    assert rows["kt-moe"] == f"{kt_kernel.__version__} ({kt_kernel.__cpu_kernel__} kernels)"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (OSError(28, "No space left on device", "a/b"), 1, "a/b: No space left on device"),
        (
            FileNotFoundError(2, "No such file or directory", ""),
            1,
            "an empty path: No such file or directory",
        ),
        (ValueError("two\nlines"), 1, "two lines"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, "MemoryError"),
    ],
)
def test_errors_from_inside(kt, monkeypatch, error, code, line):
    from kt_kernel.cli import version

    def fail():
        raise error

    monkeypatch.setattr(version, "_cuda", fail)
    assert kt("version") == (code, "", f"kt: error: {line}\n")


def test_an_interrupted_conversion(kt, source, tmp_path, monkeypatch):
    from kt_kernel.conversion import run as conversion

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "_pack", interrupt)
    result = kt("quant", source, tmp_path / "out", "--quant-method", "int8")
    failed(result, 130, "interrupted; run the same command with --resume to continue")


def test_what_is_no_error_of_the_user_shows_where_it_comes_from(kt, monkeypatch):
    from kt_kernel.cli import version

    monkeypatch.setattr(version, "_cuda", lambda: {}["x"] + 1 / 0)
    monkeypatch.setenv("KT_KERNEL_DEBUG", "1")
    with pytest.raises(KeyError):
        kt("version")


def test_as_a_module(source, tmp_path):
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, "-m", "kt_kernel.convert", "--input-path", source]
    options = ["--output", tmp_path / "out", "--quant-method", "int8"]
    run_it = subprocess.run([*command, *options], env=env, capture_output=True, text=True)
    assert run_it.returncode == 0 and "2 layers for method AMXINT8" in run_it.stdout, run_it.stderr
    run_it = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run_it.returncode == 2 and run_it.stderr.startswith("kt: error: ")


# --- kt cache


def test_cache(kt, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "kt-moe"
    assert kt("cache") == (0, f"kt: {folder} holds no measurements\n", "")
    folder.mkdir()
    (folder / "envs").mkdir()
    threads, tuning = folder / "threads.json", folder / "tuning.json"
    threads.write_text(json.dumps({"this CPU": 14, "that CPU": 3}))
    tuning.write_text(json.dumps({"this CPU, amx: BF16": {"gemm_min_rows": 7, "row_block": 64}}))
    code, stdout, stderr = kt("cache")
    assert (code, stderr) == (0, "")
    assert stdout.splitlines() == [
        str(threads),
        "  this CPU: 14",
        "  that CPU: 3",
        str(tuning),
        '  this CPU, amx: BF16: {"gemm_min_rows": 7, "row_block": 64}',
    ]
    left = folder / "tuning.json.0123.partial"
    left.touch()
    code, stdout, _ = kt("cache", "--clear")
    assert code == 0 and stdout.splitlines() == [
        f"kt: removed {f}" for f in (threads, tuning, left)
    ]
    assert os.listdir(folder) == ["envs"]
    assert kt("cache", "--clear") == (0, f"kt: {folder} holds no measurements\n", "")
    threads.mkdir()
    failed(kt("cache", "--clear"), 1, threads)


# --- kt quant --report


def test_report(kt, source, tmp_path):
    """The numbers are those of `weight_report`; a finished conversion is only reported on."""
    from kt_kernel.accuracy.weights import table, to_json, weight_report

    out, file = tmp_path / "out", tmp_path / "report.json"
    options = ["--quant-method", "int4_g32", "--threads", 1, "--report", "--report-json", file]
    code, printed, _ = kt("quant", source, out, *options)
    assert code == 0
    wanted = weight_report(source, source, "INT4_G32", threads=1, scale_search=True)
    assert printed.endswith(table(wanted) + "\n") and file.read_text() == to_json(wanted) + "\n"
    again = kt("quant", source, out, *options, "--resume")
    assert again[0] == 0 and table(wanted) in again[1]
    # A link stays, and what cannot be replaced, such as /dev/stdout in a pipe, is written to.
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(file)
    file.write_text("old")
    assert kt("quant", source, out, *options[:-1], link, "--resume")[0] == 0
    assert link.is_symlink() and file.read_text() == to_json(wanted) + "\n"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        assert kt("quant", source, out, *options[:-1], pipe, "--resume")[0] == 0
        assert reader.communicate()[0] == file.read_text()


def test_plain_scales(kt, source, tmp_path):
    """Scales are searched unless that is not wanted, and the two do not mix."""
    paths = {}
    for name, options in (("searched", []), ("plain", ["--no-scale-search"])):
        paths[name] = tmp_path / name
        command = ["quant", source, paths[name], "--quant-method", "int4_g32", *options]
        assert kt(*command)[0] == 0
        manifest = json.loads((paths[name] / "kt_manifest.json").read_text())
        assert manifest["scale_search"] == (name == "searched")
    files = [(path / "layer-00000.safetensors").read_bytes() for path in paths.values()]
    assert files[0] != files[1]
    failed(
        kt("quant", source, paths["plain"], "--quant-method", "int4_g32", "--resume"),
        1,
        "holds a different conversion",
        "scale_search True",
    )


def test_report_that_cannot_be_made(kt, source, tmp_path):
    """Said before anything is converted."""
    out, text = tmp_path / "out", tmp_path / "text"
    text.write_bytes(b"\xff\xfe")
    command = ["quant", source, out, "--quant-method", "int8"]
    failed(kt(*command, "--text", text), 2, "--text", "needs --report")
    failed(kt(*command, "--report-json", text), 2, "--report-json", "needs --report")
    failed(kt(*command, "--report", "--text", tmp_path / "none"), 1, tmp_path / "none", "no such")
    failed(kt(*command, "--report", "--text", text), 1, text, "UTF-8")
    failed(kt(*command, "--report", "--report-json", tmp_path / "a" / "b"), 1, "a/b: no such")
    report = kt(
        *command, "--report", "--report-json", tmp_path / "report", "--text", tmp_path / "n"
    )
    failed(report, 1, "no such")
    assert not (tmp_path / "report").exists()
    failed(kt("quant", "--from-kt", source, "-o", out, "--report"), 2, "--report", "converted")
    failed(kt("quant", KT_FOLDER, out, "--quant-method", "int8", "--report"), 2, "kt-kernel")
    for file in (source / "config.json", out / "report.json"):
        failed(kt(*command, "--report", "--report-json", file), 2, file, "elsewhere")
    assert not out.exists() and "qwen3_moe" in (source / "config.json").read_text()


def test_report_with_a_text(kt, source, tmp_path, monkeypatch):
    from kt_kernel.accuracy import loss

    calls = []
    monkeypatch.setattr(loss, "windows_of", lambda *a: calls.append(a))
    monkeypatch.setattr(loss, "loss_report", lambda *a, **k: calls.append((a, k)) or "the loss")
    text = tmp_path / "text"
    text.write_text("Some words.")
    out = tmp_path / "out"
    code, printed, _ = kt(
        "quant", source, out, "--quant-method", "int8", "--report", "--text", text
    )
    assert code == 0 and printed.endswith("the loss\n")
    assert calls[0][:2] == (str(source), "Some words.")
    assert calls[1] == ((str(source), str(out), "AMXINT8", "Some words."), {"threads": None})


def test_report_without_transformers(kt, source, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    text = tmp_path / "text"
    text.write_text("Some words.")
    command = ["quant", source, tmp_path / "out", "--quant-method", "int8", "--report"]
    failed(kt(*command, "--text", text), 1, "pip install transformers")
    assert not (tmp_path / "out").exists()
