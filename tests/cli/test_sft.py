"""kt sft train: what it refuses, and where it says so."""

import json
import math
import os
import signal
import sys

import pytest
from outcome import failed

from kt_kernel.cli import main
from kt_kernel.cli.sft_progress import summary
from kt_kernel.training.results import Metrics
from kt_kernel.training.run import Result

MINIMUM = {
    "model": {"path": "model"},
    "data": {"train": "text.txt"},
    "output": {"folder": "out"},
}


def write(folder, content):
    lines = []
    for section, keys in content.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    path = folder / "sft.toml"
    path.write_text("\n".join(lines))
    return path


def merged(changes):
    return {name: MINIMUM.get(name, {}) | changes.get(name, {}) for name in {**MINIMUM, **changes}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora": {"rnak": 4}}, ["[lora] rnak: unknown key", "did you mean rank?", "dropout"]),
        ({"lroa": {}}, ["lroa: unknown section", "did you mean lora?", "training"]),
        ({"lora": {"rank": 0}}, ["[lora] rank = 0", "whole number, 1 to 4096"]),
        ({"lora": {"rank": True}}, ["[lora] rank = true", "1 to 4096"]),
        ({"lora": {"rank": 5000}}, ["[lora] rank = 5000", "1 to 4096"]),
        ({"lora": {"rank": "8"}}, ["[lora] rank = '8'", "whole number"]),
        ({"lora": {"alpha": 0}}, ["[lora] alpha = 0", "above 0"]),
        ({"lora": {"dropout": 1}}, ["[lora] dropout = 1", "0 or more and less than 1"]),
        ({"lora": {"dropout": 0.999999999}}, ["dropout = 0.999999999", "less than 1, in float32"]),
        ({"lora": {"alpha": 1e300}}, ["[lora] alpha = 1e+300", "above 0, in float32"]),
        ({"lora": {"alpha": 1e-300}}, ["[lora] alpha = 1e-300", "above 0, in float32"]),
        ({"lora": {"alpha": 10**400}}, ["[lora] alpha = 1000", "above 0, in float32"]),
        ({"training": {"epochs": 10**400}}, ["[training] epochs = 1000", "above 0"]),
        ({"lora": {"attention_modules": ["q", "q"]}}, ["attention_modules", "different"]),
        ({"model": {"method": "INT8"}}, ["[model] method = 'INT8'", '"AMXINT8_SFT"']),
        ({"model": {"method": "AMXINT8_SFT_SkipLoRA"}}, ["[model] method", "accepted"]),
        ({"model": {"group_size": 48}}, ["group_size = 48", "multiple of 32"]),
        ({"model": {"dtype": "float16"}}, ["dtype = 'float16'", '"bfloat16", "float32"']),
        ({"model": {"path": " "}}, ["[model] path = ' '", "a string"]),
        ({"data": {"train": [1]}}, ["[data] train = [1]", "list"]),
        ({"data": {"train": []}}, ["[data] train = []", "1 or more"]),
        ({"data": {"held_out": "./text.txt"}}, ["[data] held_out", "text.txt is in train, too"]),
        ({"training": {"seed": -1}}, ["seed = -1", "0 to 4294967295"]),
        ({"training": {"steps": 10**10}}, ["steps = 10000000000", "0 to 1000000000"]),
        ({"data": {"held_out_fraction": 1.0}}, ["held_out_fraction = 1.0", "less than 1"]),
        (
            {"data": {"held_out": "a.txt", "held_out_fraction": 0.1}},
            ["held_out and held_out_fraction exclude each other"],
        ),
        ({"data": {"sequence_length": 1}}, ["sequence_length = 1", "whole number, 2 to"]),
        ({"training": {"steps": 5, "epochs": 1}}, ["steps and epochs exclude each other"]),
        ({"training": {"warmup": 1.5}}, ["warmup = 1.5", "whole number of steps"]),
        ({"training": {"warmup": 9, "steps": 5}}, ["warmup = 9", "at most steps = 5"]),
        ({"training": {"learning_rate": 0}}, ["learning_rate = 0", "above 0"]),
        ({"training": {"schedule": "step"}}, ["schedule = 'step'", '"cosine"']),
        ({"training": {"gradient_checkpointing": 1}}, ["true or false"]),
        ({"output": {"layout": "flat"}}, ["layout = 'flat'", '"per_expert"']),
    ],
)
def test_keys_that_are_refused(kt, tmp_path, changes, words):
    path = write(tmp_path, merged(changes))
    failed(kt("sft", "train", path), 1, path, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "section, key", [("model", "path"), ("data", "train"), ("output", "folder")]
)
def test_a_missing_key(kt, tmp_path, section, key):
    content = {name: dict(keys) for name, keys in MINIMUM.items()}
    del content[section][key]
    path = write(tmp_path, content)
    failed(kt("sft", "train", path), 1, path, f"[{section}] {key} is missing")


def test_no_settings(kt, tmp_path):
    failed(kt("sft", "train", tmp_path / "none.toml"), 1, "none.toml", "no such file")
    path = tmp_path / "bad.toml"
    path.write_text("[model\n")
    failed(kt("sft", "train", path), 1, path, "not valid TOML", "line 1")
    path.write_text("model = 3\n")
    failed(kt("sft", "train", path), 1, path, "model = 3", "expected a section")


def test_files_that_are_refused(kt, tmp_path):
    text = tmp_path / "text.txt"
    failed(kt("sft", "train", write(tmp_path, MINIMUM)), 1, text, "no such file")
    text.write_text("Words.")
    failed(kt("sft", "train", write(tmp_path, MINIMUM)), 1, "path = model: no such folder")
    (tmp_path / "model").mkdir()
    failed(kt("sft", "train", write(tmp_path, MINIMUM)), 1, "config.json is missing")
    csv = tmp_path / "text.csv"
    csv.write_text("a,b")
    path = write(tmp_path, merged({"data": {"train": ["text.csv"]}}))
    failed(kt("sft", "train", path), 1, csv, ".txt", ".jsonl")
    assert not (tmp_path / "out").exists()


def test_results_that_cannot_be_written(kt, tmp_path):
    """Said before the data are read."""
    (tmp_path / "text.txt").write_text("Words.")
    out = tmp_path / "out"
    out.write_text("")
    failed(kt("sft", "train", write(tmp_path, MINIMUM)), 1, out, "Not a directory")
    out.unlink()
    for name in ("run.json", "metrics.json", "loss.png"):
        (out / name).mkdir(parents=True)
        failed(kt("sft", "train", write(tmp_path, MINIMUM)), 1, out / name, "not a regular file")
        (out / name).rmdir()
    assert list(out.iterdir()) == []


def test_missing_libraries(kt, tmp_path, monkeypatch):
    from kt_kernel.training import run

    monkeypatch.setattr(run, "find_spec", lambda name: None)
    result = kt("sft", "train", write(tmp_path, MINIMUM))
    failed(result, 1, "transformers, accelerate, matplotlib", "pip install 'kt-moe[sft]'")


def test_several_processes(kt, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("Words.")
    monkeypatch.setenv("WORLD_SIZE", "2")
    failed(kt("sft", "train", write(tmp_path, MINIMUM)), 1, "WORLD_SIZE=2", "wrap_experts")


def test_how_an_interrupted_run_ends(kt, tmp_path, monkeypatch):
    from kt_kernel.training import run

    def stopped(*arguments, **named):
        raise run.Stopped("stopped after step 3 of 8")

    monkeypatch.setattr(run, "train", stopped)
    path = write(tmp_path, MINIMUM)
    failed(
        kt("sft", "train", path), 130, "stopped after step 3 of 8; run the same command", "--resume"
    )

    def at_once(settings, resume, progress):
        progress.begin(4, 8)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "train", at_once)
    code, _, stderr = kt("sft", "train", path)
    assert code == 130 and "last checkpoint: step 4; run the same command" in stderr


def test_progress_in_a_log(capsys, monkeypatch):
    from kt_kernel.cli import sft_progress

    clock = iter([0.0, 60.0, 70.0, 100.0])
    monkeypatch.setattr(sft_progress.time, "monotonic", lambda: next(clock))
    with sft_progress.Shown() as shown:
        shown.begin(0, 40)
        shown.measuring(0, 2)
        shown.measuring(2, 2)
        shown.held_out(0, 3.25)
        for step in (5, 10, 20):
            shown.step(step, 2.5, 1234.4)
    assert capsys.readouterr().err.splitlines() == [
        "kt: held-out loss after step 0: 3.2500",
        "kt: step 5 of 40: loss 2.500, held out 3.250, 1,234 tokens/s, 7 min left",
        "kt: step 20 of 40: loss 2.500, held out 3.250, 1,234 tokens/s, 2 min left",
    ]


def test_a_loss_whose_perplexity_is_beyond_float64():
    """Training that diverged ends with its results, not with an OverflowError."""
    losses = [(0, 5.0), (3, 800.0)]
    metrics = Metrics(3, [(3, 800.0)], losses, 64, 8, 1.0, 64.0)
    content = json.loads(json.dumps(metrics.to_json({}), allow_nan=False))
    assert content["held_out_perplexity"] == {"before": math.exp(5), "after": None}
    assert "-> inf, in 3 steps" in summary(Result(metrics, "adapter", "metrics.json", None))


def test_help(kt):
    code, stdout, stderr = kt("sft", "train", "--help")
    assert (code, stderr) == (0, "")
    for word in ("CONFIG", "--resume", "--output"):
        assert word in stdout


def test_signals_are_caught_once():
    from kt_kernel.training.loop import interrupts

    told = []
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with interrupts(told.append) as caught:
        assert not caught()
        signal.raise_signal(signal.SIGTERM)
        assert caught()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert told == ["SIGTERM"]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("given", [None, "ACTIVE"])
def test_waiting_threads_sleep(monkeypatch, given):
    """The command starts itself again with OMP_WAIT_POLICY, which is read when torch is imported;
    a value of the user's stays."""
    started = []

    def execv(path, arguments):
        started.append((path, arguments, os.environ["OMP_WAIT_POLICY"]))
        raise SystemExit

    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "argv", ["kt", "sft", "train", "missing.toml"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-X", "dev", "kt", "sft", "train", "x.toml"])
    with pytest.raises(SystemExit):
        main.main()
    arguments = [sys.executable, "-X", "dev", "kt", "sft", "train", "x.toml"]
    assert started == ([] if given else [(sys.executable, arguments, "PASSIVE")])
