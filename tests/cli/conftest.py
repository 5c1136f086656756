"""Runs the command kt in this process."""

import pytest

from kt_kernel.cli.main import app
from kt_kernel.cli.running import run


@pytest.fixture
def kt(capsys):
    """Runs the command. Returns exit code, stdout and stderr."""

    def call(*arguments):
        code = run(app, [str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
