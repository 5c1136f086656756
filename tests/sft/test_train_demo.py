"""make demo-sft: its settings, and what it runs in which order."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from kt_kernel import demo, demo_sft
from kt_kernel.cli.main import app
from kt_kernel.cli.running import run
from kt_kernel.training.documents import check_files
from kt_kernel.training.model import check_model
from kt_kernel.training.settings import read_settings


def test_settings(tmp_path):
    settings = read_settings(str(demo_sft.SETTINGS), str(tmp_path))
    check_files(settings.data.train)
    check_model(settings)
    assert settings.model.path == str(demo.MODEL)


@pytest.fixture
def calls(monkeypatch):
    found = []

    def train(command):
        output = command[-1]
        # As far as needed to see that the command is one that kt accepts.
        assert run(app, [*command[3:5], "no such file", *command[6:]]) == 1
        found.append(("train", *command[3:]))
        return 0 if "bad" not in output else 9

    monkeypatch.setattr(demo, "main", lambda given: found.append(("serve", *given)) or 0)
    monkeypatch.setattr(demo_sft, "run_to_its_end", train)
    return found


def test_before_and_after(calls, tmp_path):
    output = tmp_path / "out"
    assert demo_sft.main(["--output", str(output), "--prompt", "Hi", "--max-tokens", "5"]) == 0
    served = ("serve", "--prompt", "Hi", "--max-tokens", "5")
    trained = ("train", "sft", "train", str(demo_sft.SETTINGS), "--output", str(output))
    assert calls == [served, trained, (*served, "--lora", str(output / "adapter"))]


def test_a_failed_training_is_not_served(calls, tmp_path):
    assert demo_sft.main(["--output", str(tmp_path / "bad")]) == 9
    assert [call[0] for call in calls] == ["serve", "train"]


def test_only_an_earlier_run_is_removed(calls, tmp_path):
    (tmp_path / "letter.txt").write_text("keep me")
    with pytest.raises(SystemExit, match="exists, and is no earlier run"):
        demo_sft.main(["--output", str(tmp_path)])
    assert (tmp_path / "letter.txt").exists() and calls == []
    (tmp_path / "run.json").write_text("{}")
    assert demo_sft.main(["--output", str(tmp_path)]) == 0
    assert not tmp_path.exists()


def test_ctrl_c_is_left_to_the_training():
    """It saves a checkpoint then; the demo waits for it."""
    both = f"for process in (os.getppid(), {os.getpid()}): os.kill(process, signal.SIGINT)"
    child = f"import os, signal\n{both}\nraise SystemExit(7)"
    assert demo_sft.run_to_its_end([sys.executable, "-c", child]) == 7
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("given", [None, "active"])
def test_waiting_threads_sleep(monkeypatch, given):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if given:
        monkeypatch.setenv("OMP_WAIT_POLICY", given)
    wanted = given or "passive"
    child = f"import os; raise SystemExit(os.environ['OMP_WAIT_POLICY'] != {wanted!r})"
    assert demo_sft.run_to_its_end([sys.executable, "-c", child]) == 0
