"""Runs the command kt in this process; and the machine of the tests of `kt tune`."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_kernel.cli.main import app
from kt_kernel.cli.running import run as run_command
from kt_kernel.tuning import cpu, run
from kt_kernel.tuning.rates import CpuRates, GpuRates


@pytest.fixture
def kt(capsys):
    """Runs the command. Returns exit code, stdout and stderr."""

    def call(*arguments):
        code = run_command(app, [str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


class Here:
    """In place of a process that calls functions: this one, in which tests have changed them."""

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __call__(self, function: Any, *arguments: Any) -> Any:
        return function(*arguments)


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kt tune` without an engine and a GPU, with few measurements."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(cpu, "_SECONDS", 0.0)  # each point twice
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(run, "Apart", Here)
    monkeypatch.setattr(run, "host_rates", lambda: (20e9, 1e11))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose rates are known, and so are those of the CPU, which a busy machine changes."""

    def known(*given: Any) -> CpuRates:
        measured = cpu.cpu_rates(*given)
        return replace(measured, experts=((1, 1e-4), (64, 6e-3)), rows=((1, 1e-4), (64, 1e-3)))

    monkeypatch.setattr(run, "cpu_rates", known)
    rates = GpuRates("GPU", 20 << 30, ((1, 5e-5), (64, 6e-5)), 2e-6, 3e12, 5e14, 50e9, ((1, 6e-5),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "measure_gpu", lambda shape, device: rates)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (rates.total, rates.total))
