"""Commands that are ended by a signal leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ENDED = """
import os, signal, sys, tempfile, time
import typer
from kt_kernel.cli.running import run

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
app = typer.Typer()

@app.command()
def work():
    with tempfile.TemporaryDirectory(dir=sys.argv[1]):
        os.kill(os.getpid(), int(sys.argv[2]))
        time.sleep(600)

sys.exit(run(app, []))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_temporary_folders_go(number: signal.Signals, tmp_path: Path):
    command = [sys.executable, "-c", ENDED, str(tmp_path), str(int(number))]
    assert subprocess.run(command, timeout=300).returncode == 128 + number
    assert os.listdir(tmp_path) == []
