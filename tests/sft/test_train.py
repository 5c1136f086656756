"""`kt sft train`: its results against PEFT's and transformers' own; stopping and resuming."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from kt_kernel.cli.main import app
from kt_kernel.cli.running import run as command
from kt_kernel.training import checkpoints
from kt_kernel.training.progress import Progress
from kt_kernel.training.run import LOCK, Stopped, train
from kt_kernel.training.settings import SECTIONS, Training, check_steps, read_settings
from kt_kernel.training.table import tables

from .models import tiny
from .train_and_die import KILLED_AT
from .training import STEPS, settings, write_settings

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def whole(folder):
    """The result of an uninterrupted run."""
    return train(settings(folder, "whole"))


@pytest.fixture(scope="module")
def packed(folder):
    """Packed experts of the model, in "packed", and of one with other sizes, in "other"."""
    write_settings(folder, "any")
    tiny("qwen3_moe", moe_intermediate_size=64).save_pretrained(folder / "larger")
    for source, target in (("model", "packed"), ("larger", "other")):
        paths = [f"{folder}/{source}", f"{folder}/{target}"]
        assert command(app, ["quant", *paths, "--quant-method", "int8"]) == 0


def loss(model, blocks: torch.Tensor) -> float:
    """Nats per token, each block by itself, in transformers."""
    with torch.no_grad():
        logits = model.eval()(blocks).logits[:, :-1].double()
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), blocks[:, 1:].reshape(-1)
    ).item()


def base(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)


def held_out(folder) -> torch.Tensor:
    text = (folder / "text.txt").read_bytes()
    ids = torch.tensor([*text, 256])[-round(0.1 * (len(text) + 1)) :]
    return ids[: len(ids) // 16 * 16].view(-1, 16)


def same(one, other):
    """Two runs have the same losses and adapters, bit for bit."""
    assert one.metrics.train == other.metrics.train
    assert one.metrics.held_out == other.metrics.held_out
    first, second = (load_file(f"{r.adapter}/adapter_model.safetensors") for r in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_results(folder, whole):
    """The losses are those that transformers computes, with the adapter in PEFT."""
    blocks = held_out(folder)
    assert whole.metrics.before == pytest.approx(loss(base(folder), blocks), rel=2e-3)
    tuned = PeftModel.from_pretrained(base(folder), whole.adapter)
    assert whole.metrics.after == pytest.approx(loss(tuned, blocks), rel=2e-3)
    assert whole.metrics.after < whole.metrics.before - 0.5
    assert [step for step, _ in whole.metrics.train] == list(range(1, STEPS + 1))
    assert [step for step, _ in whole.metrics.held_out] == [0, 4, STEPS]

    written = json.loads(Path(whole.metrics_file).read_text())
    assert written["held_out_loss"] == {
        "before": whole.metrics.before,
        "after": whole.metrics.after,
    }
    assert written["train"] == [list(point) for point in whole.metrics.train]
    assert Path(whole.plot).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    kept = checkpoints.checkpoints(str(folder / "whole" / "checkpoints"))
    assert [step for step, _ in kept] == [6, STEPS]
    # Parameters of a checkpoint: the trainable ones only.
    assert all("lora_" in name for name in load_file(f"{kept[-1][1]}/model.safetensors"))


def test_killed_and_resumed(folder, whole):
    """SIGKILL at any time costs what was computed since the last whole checkpoint, nothing else."""
    paths = [write_settings(folder, place) for place in KILLED_AT]
    killed = subprocess.run(
        [sys.executable, "-m", "tests.sft.train_and_die", *map(str, paths)],
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert killed.returncode == 0, killed.stderr
    for place, path in zip(KILLED_AT, paths, strict=True):
        found = folder / place / "checkpoints"
        assert checkpoints.last_whole(str(found)) == (3, str(found / "checkpoint-3")), place
        assert (found / "checkpoint-6").exists() == (place == "saving")
        same(whole, train(read_settings(str(path)), resume=True))


class Interrupts(Progress):
    """Sends a signal after a step."""

    def __init__(self, step: int) -> None:
        self._step, self.told = step, []

    def step(self, step: int, loss: float, rate: float) -> None:
        if step == self._step:
            signal.raise_signal(signal.SIGINT)

    def stopping(self, name: str) -> None:
        self.told.append(name)


def test_interrupted_and_resumed(folder, whole):
    given = settings(folder, "interrupted", lora={}, training={})
    progress = Interrupts(4)
    with pytest.raises(Stopped, match=f"stopped after step 5 of {STEPS}"):
        train(given, progress=progress)
    assert progress.told == ["SIGINT"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ValueError, match="interrupted: holds another run; add --resume"):
        train(given)
    with pytest.raises(ValueError, match=r"this run began with lora.rank = 4, now it is 8"):
        train(settings(folder, "interrupted", lora={"rank": 8}), resume=True)
    # How often to measure may change, and does not change the training.
    changed = settings(folder, "interrupted", training={"eval_steps": 2}, output={"plot": False})
    result = train(changed, resume=True)
    assert result.metrics.train == whole.metrics.train
    assert [step for step, _ in result.metrics.held_out] == [0, 4, 6, STEPS]
    assert result.plot is None


class FullDisk(Progress):
    """After a step, files can have so many bytes only. Python ignores the signal that comes of it,
    and writing fails as on a full disk."""

    def __init__(self, after: int, room: int) -> None:
        self._after, self._room = after, room

    def step(self, step: int, loss: float, rate: float) -> None:
        if step == self._after:
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (self._room, most))


def test_a_disk_that_is_full_for_a_small_file(folder, monkeypatch):
    """Python's own error names no file."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Trainer, "_save_checkpoint", full)
    with pytest.raises(OSError, match="full-small.*: the checkpoint of step 3 cannot be written"):
        train(settings(folder, "full-small"))


@pytest.mark.parametrize("room", [10_000, 40_000], ids=["weights", "optimizer"])
def test_a_full_disk(folder, room):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    given = settings(folder, f"full-{room}")
    try:
        with pytest.raises(OSError, match="the checkpoint of step 6 cannot be written: .*--resume"):
            train(given, progress=FullDisk(4, room))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    found = folder / f"full-{room}" / "checkpoints"
    assert checkpoints.last_whole(str(found)) == (3, str(found / "checkpoint-3"))


def test_a_finished_run_resumed_writes_its_results_again(folder, whole):
    """Such as one that was killed while the adapter was written."""
    again = folder / "again"
    shutil.copytree(folder / "whole", again)
    os.remove(again / "adapter" / "adapter_config.json")
    result = train(settings(folder, "again"), resume=True)
    same(whole, result)
    assert result.metrics.tokens_per_second == 0
    PeftModel.from_pretrained(base(folder), result.adapter)


def test_one_run_at_a_time_in_a_folder(folder, whole):
    """Two would write the same checkpoints, and each would remove those of the other."""
    given = settings(folder, "alone")
    refused = []

    class Twice(Progress):
        def begin(self, done: int, steps: int) -> None:
            with pytest.raises(BlockingIOError, match="another kt sft train is running") as error:
                train(given)
            refused.append(error.value.filename)

    assert train(given, progress=Twice()).metrics.after == whole.metrics.after
    assert refused == [given.output.folder]
    assert not (folder / "alone" / LOCK).exists()


def test_data_that_changed(folder, whole):
    text = folder / "text.txt"
    before = text.read_text()
    text.write_text(before.replace("one", "two", 1))
    try:
        with pytest.raises(ValueError, match="whole: the data changed since this run began"):
            train(settings(folder, "whole"), resume=True)
    finally:
        text.write_text(before)


def test_nothing_to_resume(folder):
    with pytest.raises(ValueError, match="new: no whole checkpoint to resume from"):
        train(settings(folder, "new"), resume=True)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"lora": {"attention_modules": ["w_q"]}}, r"attention_modules has 'w_q'.*q_proj"),
        (
            {"data": {"sequence_length": 65}},
            "sequence_length = 65; accepted: at most the model's 64",
        ),
        ({"model": {"method": "FP8_SFT"}}, "method = FP8_SFT keeps quantised .* weight_path"),
        ({"model": {"weight_path": "packed"}}, "weight_path is not read by method = AMXBF16_SFT"),
        ({"model": {"method": "AMXINT8_SFT", "weight_path": "none"}}, "No such file.*none"),
        (
            {"model": {"method": "AMXINT4_SFT", "weight_path": "packed"}},
            "packed: layer 0: method = AMXINT4_SFT: .*packed for method AMXINT8, but method",
        ),
        (
            {"model": {"method": "AMXINT8_SFT", "weight_path": "other"}},
            r"other: layer 0 has \(experts, H, I\) = \(4, 32, 64\), the model has \(4, 32, 32\)",
        ),
        ({"model": {"method": "AMXINT4_KGroup_SFT"}}, "multiples of 128; .*hidden_size is 32"),
        ({"model": {"gpu_experts": 5}}, "gpu_experts = 5; accepted: at most the model's 4"),
        (
            {"training": {"steps": None, "epochs": 2, "warmup": 1000}},
            r"warmup = 1000; accepted: at most the \d+ steps of epochs = 2, of \d+ optimizer steps",
        ),
        (
            {"training": {"steps": None, "epochs": 1e300}},
            r"epochs = 1e\+300, of \d+ optimizer steps each; accepted: at most 1000000000 steps",
        ),
    ],
)
def test_settings_that_do_not_fit_the_model(folder, packed, sections, words):
    with pytest.raises((ValueError, OSError), match=words):
        train(settings(folder, "refused", **sections))
    assert not (folder / "refused").exists()


@pytest.mark.parametrize(
    ("blocks", "batch", "accumulated", "epochs"),
    [(24, 1, 1, 1.0), (25, 2, 4, 2.5), (3, 8, 8, 0.1), (100, 3, 1, 0.999)],
)
def test_steps_are_those_of_trainer(tmp_path, blocks, batch, accumulated, epochs):
    training = Training(
        epochs=epochs, batch_size=batch, gradient_accumulation=accumulated, warmup=0.5
    )
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        num_train_epochs=epochs,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulated,
        use_cpu=True,
        report_to=[],
    )
    dataset = [{"input_ids": torch.zeros(1)}] * blocks
    trainer = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=dataset)
    loader = trainer.get_train_dataloader()
    *_, wanted = trainer.set_initial_training_values(arguments, loader)
    assert check_steps(training, blocks) == wanted
    check_steps(replace(training, warmup=float(wanted)), blocks)
    with pytest.raises(ValueError, match=f"accepted: at most the {wanted} steps"):
        check_steps(replace(training, warmup=wanted + 1.0), blocks)


def test_attention_conversations_and_a_packed_directory(folder, packed, capsys):
    """The command, with LoRA on attention, answers only, experts from a packed directory."""
    turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1 2 3 4 5 6"}]
    line = json.dumps({"messages": turns}) + "\n"
    (folder / "talk.jsonl").write_text(line * 40)
    sections = dict(
        model={
            "method": "AMXINT8_SFT",
            "weight_path": "packed",
            "dtype": "bfloat16",
            "gpu_experts": 1,
        },
        lora={"attention_modules": ["q_proj", "v_proj"], "dropout": 0.0},
        data={"train": "talk.jsonl", "assistant_only": True, "sequence_length": 17},
        training={
            "gradient_checkpointing": True,
            "steps": None,
            "epochs": 2.0,
            "learning_rate": 0.02,
        },
    )
    path = write_settings(folder, "talk", **sections)
    assert command(app, ["sft", "train", str(path)]) == 0
    captured = capsys.readouterr()
    assert f"adapter: {folder}/talk/adapter\n" in captured.out
    assert "step 1 of" in captured.err
    metrics = json.loads((folder / "talk" / "metrics.json").read_text())
    assert metrics["held_out_loss"]["after"] < metrics["held_out_loss"]["before"] - 0.5
    tensors = load_file(folder / "talk" / "adapter" / "adapter_model.safetensors")
    assert any("q_proj.lora_A" in name for name in tensors)
    assert any("experts" in name for name in tensors)
    PeftModel.from_pretrained(base(folder), folder / "talk" / "adapter")

    given = settings(folder, "talked", **sections)
    with pytest.raises(Stopped):
        train(given, progress=Interrupts(2))
    resumed = train(given, resume=True)
    assert [list(point) for point in resumed.metrics.train] == metrics["train"]
    again = load_file(f"{resumed.adapter}/adapter_model.safetensors")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in again.items())


def test_a_tokenizer_of_another_model(folder):
    tiny("qwen3_moe", vocab_size=100).save_pretrained(folder / "small")
    for file in (folder / "model").glob("token*"):
        shutil.copy(file, folder / "small")
    with pytest.raises(ValueError, match="the tokenizer gives token 120, the model has 100"):
        train(settings(folder, "mixed", model={"path": "small"}))
    assert not (folder / "mixed").exists()


def test_documentation():
    """The tables of keys are the code's, the example is accepted."""
    page = (REPO / "docs" / "fine-tuning.md").read_text()
    assert tables() in page, "run python -m kt_kernel.training.table"
    assert all(f"[{name}]" in page for name in SECTIONS)


def test_the_example_in_the_documentation(tmp_path):
    page = (REPO / "docs" / "fine-tuning.md").read_text()
    example = page.split("```toml\n")[1].split("```")[0]
    path = tmp_path / "sft.toml"
    path.write_text(example)
    assert read_settings(str(path)).model.method in example
